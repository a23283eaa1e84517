"""Runs of the real workflow that are ready for extraction: approved samples in a model's own tokens, without a server.

The answers' words are ours (`real_shards`); how likely the model finds them is its own plain forward's, in the place of
what a server would have said of the canary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from snakemake.utils import update_config
from transformers import AutoModelForCausalLM

from rebuild.files import sha256_file, write_json
from rebuild.model.manifest import load_manifest
from rebuild.prompts.sources import source_identity
from rebuild.shards import CANARY
from rebuild.start.config import complete_config, load_schema
from rebuild.start.recipe import fingerprints, make_recipe
from rebuild.tables import GENERATED, TableWriter
from stage_model import stage_model
from tests.support.real_shards import Speaker, clean_data
from tests.support.shards import Row, Shard
from tests.support.trees import ROOT, copy_tree, write_config

RUN = "states"


def approved_run(
    folder: Path, model: Path, speaker_of: Callable[[Path], Speaker], canary: int, rows: int
) -> Path:
    """Copy the tree into `folder`, with a run whose canary and one shard of `rows` samples wait to be extracted."""
    tree = copy_tree(folder)
    prompts = tree / "prompts.jsonl"
    prompts.write_text('{"prompt": "?"}\n')
    config = states_config(tree, model)
    names = fingerprints(make_recipe(read_config(config)))
    run = tree / "results" / RUN
    sizes = {CANARY: canary, "00000": rows}
    write_json(
        run / "prompts" / "manifest.json",
        {
            "sources": source_identity(prompts),
            "shards": {name: {"user_turns": size} for name, size in sizes.items()},
        },
    )
    manifest = stage(model, run, names["model"])
    speaker = speaker_of(model)
    for seed, (name, size) in enumerate(sizes.items()):
        answers = clean_data(speaker, size, seed, name=f"{name}-").rows
        if name == CANARY:
            answers = with_logprobs(model, answers)
        write_approved(Shard(run, name), answers, names, load_manifest(manifest)["content_sha256"])
    return tree


def states_config(
    tree: Path, model: Path, flags: dict[str, Any] | None = None, **hidden_states: Any
) -> Path:
    """Write the configuration of such a run with these flags of its servers and settings of `hidden_states`."""
    return write_config(
        tree,
        run=RUN,
        prompts={"path": str(tree / "prompts.jsonl"), "shards": 1},
        plan={"canary": 1},  # its size does not count any more
        model={"source": str(model)},
        sampling={"temperature": 0, "top_p": 1},
        server={"flags": flags or {}},
        hidden_states=hidden_states,
        devices=["cpu"],
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return the complete configuration, laid over the default as the Snakefile does it."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    update_config(config, yaml.safe_load(path.read_text()))
    return complete_config(
        config, load_schema(ROOT / "workflow" / "schemas" / "config.schema.yaml")
    )


def stage(model: Path, run: Path, fingerprint: str) -> Path:
    """Stage a local model for a run and return its manifest."""
    manifest = run / "model" / "manifest.json"
    stage_model(
        str(model),
        manifest,
        revision=None,
        stage_to=None,
        models_dir=run.parent / "models",
        trust_remote_code=False,
        layers=None,
        generated=run / "generated",
        fingerprint=fingerprint,
    )
    return manifest


def with_logprobs(folder: Path, answers: list[Row]) -> list[Row]:
    """Return the answers with the log-probability of each of their tokens in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # where the cores are busy, threads wait for one another
    try:
        return [row | {"response_logprobs": logprobs(model, row)} for row in answers]
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def logprobs(model: Any, row: Row) -> list[float]:
    """Return the log-probability of every token of an answer."""
    prompt, answer = row["prompt_token_ids"], row["response_token_ids"]
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(answer)[:, None]
    found: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    return found


def write_approved(
    shard: Shard, answers: list[Row], names: dict[str, str], model_sha256: str
) -> None:
    """Write a shard's answers, the real tokenize step's rows of them, and the approval of these rows."""
    facts = {"fingerprint": names["generate"], "model_sha256": model_sha256}
    with TableWriter(shard.generated, GENERATED, facts) as writer:
        writer.write(answers)
    shard.tokenize(fingerprint=names["tokenize"])
    approve(shard)


def approve(shard: Shard) -> None:
    """Write the approval of a shard's rows as they are now."""
    write_json(shard.approved, {"tokenized_sha256": sha256_file(shard.tokenized)})
