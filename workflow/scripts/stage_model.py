"""Bring the target model to this machine and record what it is."""

from pathlib import Path

from rebuild.errors import StepError
from rebuild.files import write_json
from rebuild.model.copies import copy_model
from rebuild.model.files import check_folder, content_sha256, hash_files
from rebuild.model.manifest import MANIFEST_VERSION, Model, describe_config
from rebuild.model.source import obtain_model
from rebuild.states.drafter import check_target, read_drafter
from rebuild.states.layers import choose_layers
from rebuild.step import begin_step, say
from rebuild.tables import read_metadata
from rebuild.tokens.chat import load_tokenizer, template_sha256


def stage_model(
    source: str,
    manifest: Path,
    *,
    revision: str | None,
    stage_to: Path | None,
    models_dir: Path,
    trust_remote_code: bool,
    layers: str | list[int] | None,
    generated: Path,
    fingerprint: str,
    eagle3: bool = False,
    drafter: str | None = None,
) -> None:
    """Obtain the model that `source` names, check it, copy it to `stage_to` if given, and write its manifest.

    A local folder is used where it lies and never written to; what is converted or downloaded lands in `models_dir`.
    Answers in `generated` that an earlier staging led to must be this very model's; `layers` (None where no states are
    wanted) must be layers of it, and the target that `drafter` was made for: better said now than after all answers are
    paid for.

    Raises:
        StepError: the model cannot be had, is not whole, or cannot chat; there is no room for the copy; or it is another
            than the one whose answers are there already.
    """
    obtained = obtain_model(source, revision, models_dir)
    origin = obtained.folder
    names = check_folder(origin)
    tokenizer = load_tokenizer(origin, trust_remote_code)
    facts = describe_config(origin, tokenizer.eos_token_id)
    files = hash_files(origin, names)
    content = content_sha256(files)
    check_answers(generated, content)
    if layers is not None:
        choose_layers(layers, facts["num_hidden_layers"], eagle3=eagle3)
    if drafter is not None:
        check_target(read_drafter(drafter), facts["num_hidden_layers"], facts["hidden_size"])
    folder = origin
    if stage_to is not None:
        folder = stage_to.resolve() / f"{origin.name}-{content[:12]}"
        copy_model(origin, folder, files)
    model: Model = {
        "schema_version": MANIFEST_VERSION,
        "source": source,
        "revision": obtained.revision,
        "path": str(folder),
        "origin": None if folder == origin else str(origin),
        "files": files,
        "content_sha256": content,
        "chat_template_sha256": template_sha256(tokenizer),
        **facts,
        "trust_remote_code": trust_remote_code,
        "fingerprint": fingerprint,
    }
    write_json(manifest, model)
    size = sum(file["size"] for file in files.values())
    say(f"{facts['architecture']}, {size / 1e9:.2f} GB, content {content[:12]}: {folder}")


def check_answers(generated: Path, content: str) -> None:
    """Stop if shards are there already that a model of other content answered: a run has one target.

    Raises:
        StepError: names such a shard.
    """
    for shard in sorted(generated.glob("*.parquet")):
        answered_by = read_metadata(shard).get("model_sha256")
        if answered_by != content:
            raise StepError(
                "the model that is staged now is not the one that answered so far",
                where=str(shard),
                expected=f"the model of content {str(answered_by)[:12]}",
                seen=f"a model of content {content[:12]}",
                remedy="bring the first model back (pin model.revision), or give the new one's answers a new run name",
            )


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    stage_model(
        source=snakemake.params.source,
        manifest=Path(snakemake.output.manifest),
        revision=snakemake.params.revision,
        stage_to=Path(snakemake.params.stage_to) if snakemake.params.stage_to else None,
        models_dir=Path(snakemake.params.models_dir),
        trust_remote_code=snakemake.params.trust_remote_code,
        layers=snakemake.params.layers,
        eagle3=snakemake.params.eagle3,
        drafter=snakemake.params.drafter,
        generated=Path(snakemake.params.generated),
        fingerprint=snakemake.params.fingerprint,
    )
