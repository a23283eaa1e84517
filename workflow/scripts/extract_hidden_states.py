"""Run the samples of one shard through the target model and keep the states that a drafter reads.

Before the first sample, a few are recomputed and compared. Longest first; finished samples survive a crash and are not
computed again.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebuild.audit.approval import check_approval
from rebuild.errors import StepError
from rebuild.extraction.backends import ServerSettings, Target
from rebuild.extraction.capturing import CHECKS, Job, capture_missing
from rebuild.extraction.shard import Shard
from rebuild.files import read_json, sha256_json
from rebuild.formats.needs import bytes_per_file, bytes_per_token, check_formats, wanted_states
from rebuild.formats.shard_files import finish_shard
from rebuild.formats.speculators import layer_ids
from rebuild.model.manifest import Model, load_manifest
from rebuild.serving.devices import Device, Setting, select_devices
from rebuild.serving.lease import check_granted
from rebuild.shards import CANARY
from rebuild.states.budget import Size, check_whole_run, reserved
from rebuild.states.captured import Wanted
from rebuild.states.drafter import check_target, read_drafter
from rebuild.states.layers import choose_layers
from rebuild.states.parts import Part
from rebuild.states.ranges import read_canary
from rebuild.states.samples import Sample, cut, iter_samples
from rebuild.states.subset import choose_samples, shard_quota
from rebuild.step import begin_step, say
from rebuild.tables import HIDDEN_STATES, TableWriter, read_metadata

SPECULATORS = {"speculators", "speculators_fp8"}

Settings = dict[str, Any]


@dataclass(frozen=True)
class Around:
    """What a capture needs besides the shard: settings of other sections, devices, and where its work in progress goes."""

    server: Settings
    sampling: Settings
    devices: Setting
    gpus_granted: int
    server_logs: Path
    stand_in: Path
    scratch: Path


def extract_hidden_states(
    tokenized: Path,
    approved: Path,
    model_manifest: Path,
    index: Path,
    folder: Path,
    *,
    run: Path,
    settings: Settings,
    around: Around,
    fingerprint: str,
) -> None:
    """Write the files of every sample of `tokenized` into `folder`, in each trainer's format, and their `index` beside it.

    `approved` is the audit's approval of exactly this `tokenized`; `run` is results/<run>, where the canary's files and
    the server's log-probabilities are looked up. `settings` are those of `hidden_states`, its layers settled. Samples are
    cut to `max_length` tokens; those with nothing to train on after the cut are left out and counted. A log in `folder`
    tells finished samples, which are not computed again.

    Raises:
        StepError: a sample, the model, or its states are not fit, or there is no room for them; nothing of that sample
            is written.
    """
    model = load_manifest(model_manifest)
    available = select_devices(around.devices)
    wanted = choose_wanted(settings, model)
    target = describe_target(model_manifest, settings, around.sampling, available, wanted)
    shard = describe_shard(index.stem, folder, settings, model, target, fingerprint)
    check_model(tokenized, model["content_sha256"])
    judged = check_approval(tokenized, approved)
    samples, left_out = read_samples(tokenized, model["vocab_size"], settings["max_length"])
    if settings["samples"] is not None:
        samples = subset(samples, settings["samples"], shard.name, run)
    parts = shard.finished_parts(due := shard.due(samples))
    missing = shard.lacking(samples, parts)
    say_what_is_due(shard, samples, missing, settings["backend"])
    size = size_on_disk(settings, model, wanted)
    if shard.name == CANARY:
        check_room_for_run(size, samples, run, settings)
    if missing:
        check_granted(around.server["tensor_parallel"], around.gpus_granted)
        job = describe_job(shard, target, samples, missing, settings, around, available, run)
        lengths = [len(sample) for sample in missing]
        with reserved(index.parent, shard.name, size, lengths, settings["max_disk_gb"]):
            parts = capture_missing(job, due, parts)
    finish_shard(folder, shard.formats, samples)
    facts = {
        "fingerprint": fingerprint,
        "model_sha256": model["content_sha256"],
        "backend": settings["backend"],
        "compute_dtype": target.dtype,
        "left_out": str(left_out),
        "tokenized_sha256": judged,
        "checks": json.dumps(read_json(checks) if (checks := folder / CHECKS).exists() else {}),
    }
    write_index(index, [parts[key] for key in due], facts)
    shutil.rmtree(around.scratch, ignore_errors=True)


def say_what_is_due(
    shard: Shard, samples: Sequence[Sample], missing: Sequence[Sample], backend: str
) -> None:
    """Log what is there, what is to be captured, and how."""
    say(
        f"shard {shard.name}: {len(samples)} samples, {len(samples) - len(missing)} already whole; layers "
        f"{list(shard.layers)}, formats {', '.join(shard.formats)}, backend {backend}"
    )
    if SPECULATORS.intersection(shard.formats):
        say(f"speculators counts these layers as {layer_ids(shard.layers)}")


def describe_job(
    shard: Shard,
    target: Target,
    samples: Sequence[Sample],
    missing: Sequence[Sample],
    settings: Settings,
    around: Around,
    available: list[Device],
    run: Path,
) -> Job:
    """Return the capture of the missing samples, with the canary's ranges if there is a canary and this is not it."""
    index = run / "hidden_states" / f"{CANARY}.parquet"
    canary = read_canary(index) if shard.name != CANARY and index.exists() else None
    if canary is None and shard.name != CANARY:
        say("no canary: no other backend is compared, and sizes are held against nothing")
    server = ServerSettings(around.server, around.server_logs, around.scratch, around.stand_in)
    return Job(
        shard, target, samples, missing, settings, around.sampling, server, available, run, canary
    )


def choose_wanted(settings: Settings, model: Model) -> Wanted:
    """Return the layers and final states that the settings ask for.

    Raises:
        StepError: the layers do not fit the model, or the formats contradict them or each other.
    """
    formats, last = settings["formats"], settings["include_last"]
    if settings["drafter"]:
        drafter = read_drafter(settings["drafter"])
        check_target(drafter, model["num_hidden_layers"], model["hidden_size"])
    layers = choose_layers(
        settings["layers"], model["num_hidden_layers"], eagle3="specforge_eagle3" in formats
    )
    check_formats(formats, last, layers)
    pre_norm, post_norm = wanted_states(formats, last)
    return Wanted(tuple(layers), pre_norm, post_norm)


def describe_target(
    manifest: Path,
    settings: Settings,
    sampling: Settings,
    available: Sequence[Device],
    wanted: Wanted,
) -> Target:
    """Return what is captured and how; auto computes in float32 on a CPU and in bfloat16 on a GPU."""
    dtype = settings["dtype"]
    if dtype == "auto":
        dtype = "bfloat16" if available[0].kind == "gpu" else "float32"
    temperature = float(sampling["temperature"])
    temperatures = (1.0, temperature) if temperature > 0 else (1.0,)
    return Target(manifest, wanted, dtype, settings["batch_tokens"], temperatures)


def describe_shard(
    name: str, folder: Path, settings: Settings, model: Model, target: Target, fingerprint: str
) -> Shard:
    """Return the shard with the identity of what its states are made from."""
    wanted = target.wanted
    identity = sha256_json(
        [fingerprint, model["content_sha256"], wanted.layers, target.dtype, settings["backend"]]
    )
    formats = tuple(settings["formats"])
    return Shard(name, folder, wanted.layers, formats, settings["include_last"], identity)


def check_model(tokenized: Path, content_sha256: str) -> None:
    """Stop if the shard's answers are known to be another model's than the one that is staged now."""
    answered_by = read_metadata(tokenized).get("model_sha256")
    if answered_by and answered_by != content_sha256:
        raise StepError(
            "these samples are another model's answers: a drafter would learn states that never led to them",
            where=str(tokenized),
            expected=f"answers of the staged model, content {content_sha256[:12]}",
            seen=f"answers of a model of content {answered_by[:12]}",
            remedy="stage the model that answered, or generate again under a new run name",
        )


def read_samples(
    tokenized: Path, vocab_size: int, max_length: int | None
) -> tuple[list[Sample], int]:
    """Return the checked samples, cut to `max_length`, and how many have nothing to train on after the cut."""
    samples, left_out = [], []
    for sample in iter_samples(tokenized, vocab_size):
        shorter = cut(sample, max_length)
        if shorter is None:
            left_out.append(sample.sample_id)
        else:
            samples.append(shorter)
    if left_out and not samples:
        raise StepError(
            "no sample has anything to train on within hidden_states.max_length",
            where=str(tokenized),
            expected=f"two neighbouring supervised tokens among the first {max_length} of a sample, of some at least",
            seen=f"{len(left_out)} samples without, the first of them {left_out[0]}",
            remedy="raise hidden_states.max_length above the length of the prompts",
        )
    if left_out:
        say(
            f"left out: {len(left_out)} samples have nothing to train on within hidden_states.max_length "
            f"({max_length} tokens), the first of them {left_out[0]}"
        )
    return samples, len(left_out)


def subset(samples: list[Sample], wanted: int, shard: str, run: Path) -> list[Sample]:
    """Return the shard's part of about `wanted` samples of the run (`hidden_states.samples`)."""
    manifest = read_json(run / "prompts" / "manifest.json")
    chosen = choose_samples(samples, shard_quota(wanted, shard, manifest))
    say(f"hidden_states.samples = {wanted}: {len(chosen)} of this shard's {len(samples)} samples")
    return chosen


def size_on_disk(settings: Settings, model: Model, wanted: Wanted) -> Size:
    """Return what a token and a sample take in all formats together."""
    names, last = settings["formats"], settings["include_last"]
    layers, width = len(wanted.layers), model["hidden_size"]
    return Size(
        sum(bytes_per_token(name, layers, width, last) for name in names),
        sum(bytes_per_file(name) for name in names),
    )


def check_room_for_run(size: Size, samples: list[Sample], run: Path, settings: Settings) -> None:
    """Say, and hold against the limit, what the whole run's states will take, judging by the canary's samples."""
    check_whole_run(
        run / "hidden_states",
        size,
        [len(sample) for sample in samples],
        run / "prompts" / "manifest.json",
        settings["samples"],
        settings["max_disk_gb"],
    )


def write_index(index: Path, parts: Sequence[Part], facts: dict[str, str]) -> None:
    """Write the index, one row a part."""
    facts |= {"bytes": str(sum(part["bytes"] for part in parts))}
    with TableWriter(index, HIDDEN_STATES, facts) as writer:
        writer.write([{name: part[name] for name in HIDDEN_STATES.names} for part in parts])
    say(f"{len(parts)} files of {int(facts['bytes']) / 1e6:.1f} MB in all, index {index}")


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    extract_hidden_states(
        tokenized=Path(snakemake.input.tokenized),
        approved=Path(snakemake.input.approved),
        model_manifest=Path(snakemake.input.model),
        index=Path(snakemake.output.index),
        folder=Path(snakemake.params.folder),
        run=Path(snakemake.params.run),
        settings=snakemake.params.settings,
        around=Around(
            server=snakemake.params.server,
            sampling=snakemake.params.sampling,
            devices=snakemake.params.devices,
            gpus_granted=snakemake.resources.gpu,
            server_logs=Path(snakemake.params.server_logs),
            stand_in=Path(snakemake.params.stand_in),
            scratch=Path(snakemake.params.scratch),
        ),
        fingerprint=snakemake.params.fingerprint,
    )
