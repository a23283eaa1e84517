"""Run the samples of one shard through the target model and keep the states that a drafter reads.

One sample per forward, longest first. Finished samples survive a crash and are not computed again.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path

from torch import Tensor

from rebuild.audit.approval import check_approval
from rebuild.errors import StepError
from rebuild.files import sha256_file, sha256_json
from rebuild.model.manifest import ensure_model, load_manifest
from rebuild.progress import Progress
from rebuild.serving.devices import Device, Setting, select_devices
from rebuild.serving.lease import lease_devices
from rebuild.states.judgement import LayerFacts, check_states, measure_states
from rebuild.states.layers import choose_layers
from rebuild.states.parts import (
    Part,
    begin_log,
    read_log,
    record_part,
    remove_strays,
    whole_parts,
)
from rebuild.states.samples import Sample, cut, iter_samples
from rebuild.states.specforge import DTYPE, KEY, SUFFIX, file_name, write_sample
from rebuild.step import begin_step, say
from rebuild.tables import HIDDEN_STATES, TableWriter, read_metadata

QUEUED = 2  # samples waiting for the disk; each may be gigabytes

Capture = Callable[[list[int]], Tensor]


@dataclass(frozen=True)
class Shard:
    """Where one shard's states go, and what besides its tokens they are made from."""

    name: str
    folder: Path
    layers: list[int]
    identity: str


def extract_hidden_states(
    tokenized: Path,
    approved: Path,
    model_manifest: Path,
    index: Path,
    folder: Path,
    *,
    layers: str | Sequence[int],
    compute_dtype: str,
    max_length: int | None,
    devices: Setting,
    fingerprint: str,
) -> None:
    """Write one SpecForge file per sample of `tokenized` into `folder`, and their `index` beside it.

    `approved` is the audit's approval of exactly this `tokenized`.

    `layers` are ids as in `rebuild.states.layers`, or auto; `compute_dtype` is that of the forward pass, auto being
    float32 on a CPU and bfloat16 on a GPU. Samples are cut to `max_length` tokens; those with nothing to train
    on after the cut are left out and counted. A log in `folder` tells finished samples, which are not computed again.

    Raises:
        StepError: a sample, the model, or its states are not fit; nothing of that sample is written.
    """
    model = load_manifest(model_manifest)
    available = select_devices(devices)
    dtype = forward_dtype(compute_dtype, available)
    chosen = choose_layers(layers, model["num_hidden_layers"])
    identity = sha256_json([fingerprint, model["content_sha256"], chosen, dtype, DTYPE])
    shard = Shard(index.stem, folder, chosen, identity)
    check_model(tokenized, model["content_sha256"])
    judged = check_approval(tokenized, approved)
    samples, left_out = read_samples(tokenized, model["vocab_size"], max_length)
    parts = finished_parts(shard, samples)
    missing = [sample for sample in samples if sample.sample_id not in parts]
    say(f"shard {shard.name}: {len(samples)} samples, {len(parts)} already whole; layers {chosen}")
    if missing:
        with leased_capture(model_manifest, available, chosen, dtype) as capture_states:
            parts |= compute_parts(shard, capture_states, missing)
    facts = {"fingerprint": fingerprint, "model_sha256": model["content_sha256"]}
    facts |= {"compute_dtype": dtype, "left_out": str(left_out), "tokenized_sha256": judged}
    write_index(shard, index, [parts[sample.sample_id] for sample in samples], facts)


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


def forward_dtype(setting: str, available: Sequence[Device]) -> str:
    """Return the dtype of the forward pass: the setting's, or for auto what suits the kind of device."""
    if setting != "auto":
        return setting
    return "bfloat16" if available[0].kind == "gpu" else "float32"


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
    if left_out:
        say(
            f"left out: {len(left_out)} samples have nothing to train on within hidden_states.max_length "
            f"({max_length} tokens), the first of them {left_out[0]}"
        )
    return samples, len(left_out)


def finished_parts(shard: Shard, samples: Sequence[Sample]) -> dict[str, Part]:
    """Return, by sample id, the parts of an earlier attempt that are whole and still wanted; begin the log with them."""
    wanted = {sample.sample_id: sample.made_from(shard.identity) for sample in samples}
    parts = whole_parts(read_log(shard.folder), wanted, shard.folder.parent)
    begin_log(shard.folder, parts.values())
    return parts


@contextmanager
def leased_capture(
    manifest: Path, available: list[Device], layers: Sequence[int], dtype: str
) -> Iterator[Capture]:
    """Lease one device, load the model there down to the last wanted layer, and yield what captures one sequence."""
    with lease_devices(1, available) as lease:
        device = lease.devices[0]
        if device.kind == "gpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = device.uuid
        # Only now: CUDA reads the variable once, when some library first asks what devices there are.
        from rebuild.states.capture import capture, load_target

        target = load_target(
            ensure_model(manifest),
            layers,
            dtype=dtype,
            device="cuda:0" if device.kind == "gpu" else "cpu",
            trust_remote_code=load_manifest(manifest)["trust_remote_code"],
        )
        yield bind(capture, target, dtype=DTYPE)


def compute_parts(
    shard: Shard, capture_states: Capture, missing: Sequence[Sample]
) -> dict[str, Part]:
    """Capture, judge and write the missing samples, longest first; return their parts by sample id.

    A thread writes while the model runs; the model waits when `QUEUED` samples are behind the disk.
    """
    progress = Progress(sum(map(len, missing)), "tokens")
    futures: list[Future[Part]] = []
    with ThreadPoolExecutor(max_workers=1) as writer:
        for sample in sorted(missing, key=len, reverse=True):
            states, facts = trusted_states(shard, capture_states, sample)
            futures.append(writer.submit(write_part, shard, sample, states, facts))
            if len(futures) > QUEUED:
                futures[-QUEUED - 1].result()
            progress.update(len(sample), f"{len(futures)}/{len(missing)} samples")
    progress.finish(f"{len(futures)}/{len(missing)} samples")
    return {part["sample_id"]: part for part in (future.result() for future in futures)}


def trusted_states(
    shard: Shard, capture_states: Capture, sample: Sample
) -> tuple[Tensor, list[LayerFacts]]:
    """Return one sample's states [S, D·H] on the CPU, as they will be stored, and their facts; stop if they are not fit."""
    states = capture_states(sample.input_ids.tolist())
    facts = measure_states(states, shard.layers)
    check_states(facts, f"shard {shard.name}, sample {sample.sample_id}")
    return states.cpu(), facts


def write_part(shard: Shard, sample: Sample, states: Tensor, facts: list[LayerFacts]) -> Part:
    """Write one sample's file, record it as finished, and return its part: the index row and `made_from`."""
    path = shard.folder / file_name(sample.sample_id)
    write_sample(path, sample.input_ids.tolist(), sample.loss_mask.tolist(), states)
    part: Part = {
        "sample_id": sample.sample_id,
        "file": f"{shard.folder.name}/{path.name}",
        "key": KEY,
        "seq_len": len(sample),
        "layers": shard.layers,
        "dtype": DTYPE,
        "bytes": path.stat().st_size,
        "sha256": sha256_file(path),
        "rms": [fact.rms for fact in facts],
        "finite": True,
        "zero_rows": 0,
        "made_from": sample.made_from(shard.identity),
    }
    record_part(shard.folder, part)
    return part


def write_index(shard: Shard, index: Path, parts: Sequence[Part], facts: dict[str, str]) -> None:
    """Write the index, one row a part, when the folder holds these parts and nothing else that a trainer would read."""
    strays = remove_strays(shard.folder, SUFFIX, {Path(part["file"]).name for part in parts})
    if strays:
        say(
            f"removed {len(strays)} files that are not of this shard's samples, such as {strays[0]}"
        )
    with TableWriter(index, HIDDEN_STATES, facts) as writer:
        writer.write([{name: part[name] for name in HIDDEN_STATES.names} for part in parts])
    say(f"shard {shard.name}: {len(parts)} samples in {shard.folder}, index {index}")


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    extract_hidden_states(
        tokenized=Path(snakemake.input.tokenized),
        approved=Path(snakemake.input.approved),
        model_manifest=Path(snakemake.input.model),
        index=Path(snakemake.output.index),
        folder=Path(snakemake.params.folder),
        layers=snakemake.params.layers,
        compute_dtype=snakemake.params.compute_dtype,
        max_length=snakemake.params.max_length,
        devices=snakemake.params.devices,
        fingerprint=snakemake.params.fingerprint,
    )
