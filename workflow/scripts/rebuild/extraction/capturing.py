"""The capture of what a shard still lacks: checks at the start, then sample by sample, longest first, to the disk.

Writer threads work while the model runs; the model waits when too much is behind the disk.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rebuild.errors import StepError
from rebuild.extraction.backends import (
    Opened,
    ServerSettings,
    Target,
    engine,
    open_engine,
    open_transformers,
)
from rebuild.extraction.checked import Checked, canary_sample, choose_checked
from rebuild.extraction.shard import Shard, measure, write_sample
from rebuild.extraction.trust import (
    ENGINE,
    PLAIN,
    Findings,
    capture_checked,
    check_answers,
    check_capture,
)
from rebuild.files import write_json
from rebuild.model.manifest import load_manifest
from rebuild.progress import Progress
from rebuild.serving.devices import Device
from rebuild.serving.lease import Lease, lease_devices
from rebuild.serving.server import ServerDied
from rebuild.shards import CANARY
from rebuild.states.captured import Captured, SampleError
from rebuild.states.judgement import check_states
from rebuild.states.parts import Due, Key, Part
from rebuild.states.ranges import Seen, check_sizes
from rebuild.states.samples import Sample
from rebuild.step import say

Result = TypeVar("Result")

CHECKS = ".checks.json"  # what was found at the start of the last attempt
WRITERS = 2
QUEUED = 2  # samples waiting for a writer; each may be gigabytes
BATCH_CHECKED = 4  # samples of similar length by which the effect of batching is measured


@dataclass(frozen=True)
class Job:
    """One shard's capture: its samples, those still missing, and everything that decides how they are captured."""

    shard: Shard
    target: Target
    samples: Sequence[Sample]
    missing: Sequence[Sample]
    settings: dict[str, Any]
    sampling: dict[str, Any]
    server: ServerSettings
    available: list[Device]
    run: Path
    canary: Seen | None

    @property
    def is_canary(self) -> bool:
        """Whether the shard is the canary."""
        return self.shard.name == CANARY


def capture_missing(job: Job, due: dict[Key, Due], parts: dict[Key, Part]) -> dict[Key, Part]:
    """Lease the devices, check a few samples, capture, judge and write the missing ones; return all parts.

    `parts` are those that are there already. A server that is lost is replaced as often as in generation, and the next one gets what is still missing.

    Raises:
        StepError: a check fails, or a sample's states are not fit; what was finished before is kept.
    """
    count = job.server.server["tensor_parallel"]
    with lease_devices(count, job.available) as lease:
        checked = samples_to_check(job)
        crossed = on_servers(job, lambda _: cross_capture(job, lease, checked))

        def capture_rest(again: bool) -> dict[Key, Part]:
            there = job.shard.finished_parts(due) if again else parts
            rest = replace(job, missing=job.shard.lacking(job.missing, there))
            if not rest.missing:
                return there
            with open_backend(rest, lease, checked) as opened:
                findings = check_start(rest, opened, checked, crossed)
                return there | write_missing(rest, opened, findings, due)

        return on_servers(job, capture_rest)


def on_servers(job: Job, work: Callable[[bool], Result]) -> Result:
    """Return what `work` returns, begun again when its server is lost; it is told whether it is begun again.

    Raises:
        ServerDied: more than `server.max_restarts` servers were lost, or two did not even get ready.
    """
    lost: list[ServerDied] = []
    while True:
        try:
            return work(bool(lost))
        except ServerDied as error:
            lost.append(error)
            unready = sum(not other.ready for other in lost)
            if len(lost) > job.server.server["max_restarts"] or unready > 1:
                raise
            say(f"the server was lost: {error.what}; starting another, finished samples are kept")


def samples_to_check(job: Job) -> list[Checked]:
    """Return the samples that are recomputed before anything is captured."""
    generated = job.run / "generated"
    vocabulary = load_manifest(job.target.manifest)["vocab_size"]
    canary = (
        []
        if job.is_canary
        else canary_sample(
            job.run / "tokenized" / f"{CANARY}.parquet",
            generated / f"{CANARY}.parquet",
            vocabulary,
            job.settings["max_length"],
        )
    )
    return choose_checked(
        job.shard.name, job.samples, generated / f"{job.shard.name}.parquet", canary
    )


def cross_capture(job: Job, lease: Lease, checked: Sequence[Checked]) -> list[Captured] | None:
    """Return the checked samples of the canary as SGLang captures them, where transformers is the backend."""
    if not (job.is_canary and job.settings["cross_check"]):
        return None
    if job.settings["backend"] != "transformers":
        return None  # the engine's states are held against transformers' anyway
    longest = max(len(case.sample) for case in checked)
    with engine(job.target, job.server, lease, longest) as capture_all:
        return capture_checked(capture_all, checked)


@contextmanager
def open_backend(job: Job, lease: Lease, checked: Sequence[Checked]) -> Iterator[Opened]:
    """Open the backend of the settings."""
    if job.settings["backend"] == "transformers":
        with open_transformers(job.target, lease, checked) as opened:
            yield opened
    else:
        longest = max(len(sample) for sample in [*job.missing, *(case.sample for case in checked)])
        with open_engine(job.target, job.server, lease, checked, longest) as opened:
            yield opened


def check_start(
    job: Job, opened: Opened, checked: Sequence[Checked], crossed: Sequence[Captured] | None
) -> Findings:
    """Hold the capture, the other backend's and the server's log-probabilities against the references.

    Raises:
        StepError: any of them differs by more than `hidden_states.limits` allows.
    """
    findings, limits = Findings(), job.settings["limits"]
    of_engine = job.settings["backend"] == "sglang"
    taken = capture_checked(opened.capture_all, checked)
    for captured, case in zip(taken, checked, strict=True):
        check_states(measure(captured, job.shard.layers), case.where)
    limit = limits["engine_error" if of_engine else "reference_error"]
    what = ENGINE if of_engine else "the capture"
    wanted = job.target.wanted
    check_capture(
        findings, "capture", taken, checked, opened.references, wanted, limit, (what, PLAIN)
    )
    if crossed is not None:
        limit = limits["engine_error"]
        check_capture(
            findings, "engine", crossed, checked, opened.references, wanted, limit, (ENGINE, PLAIN)
        )
    check_answers(findings, checked, opened.references, job.sampling, limits, job.canary)
    if opened.batching is not None:
        check_batching(job, opened, findings)
    write_json(job.shard.folder / CHECKS, findings.facts())
    return findings


def check_batching(job: Job, opened: Opened, findings: Findings) -> None:
    """Measure what padding does to a few samples of similar length.

    Raises:
        StepError: more than `hidden_states.limits.batching_error`.
    """
    assert opened.batching is not None
    ordered = sorted(job.missing, key=len)
    few = ordered[: len(ordered) // 2 + 1][-BATCH_CHECKED:]
    errors = opened.batching([sample.input_ids.tolist() for sample in few])
    findings.add("batching", errors)
    limit = job.settings["limits"]["batching_error"]
    say(f"padded batches against one at a time: largest error of a layer {max(errors):.2g}")
    if max(errors) > limit:
        raise StepError(
            "padding changes the hidden states too much",
            where=f"shard {job.shard.name}, layer {job.target.wanted.layers[errors.index(max(errors))]}",
            expected=f"a relative error of at most {limit:g} (hidden_states.limits.batching_error)",
            seen=f"{max(errors):.4g} over {len(few)} samples of {len(few[0])} to {len(few[-1])} tokens",
            remedy="set hidden_states.batch_tokens: null, which captures one sample at a time",
        )


def write_missing(
    job: Job, opened: Opened, findings: Findings, due: dict[Key, Due]
) -> dict[Key, Part]:
    """Capture, judge and write the missing samples, longest first; return their parts.

    Judging is the writers' as well: it takes long enough to keep a GPU waiting. What a writer finds wrong stops the job
    a sample or two later.
    """
    order = sorted(job.missing, key=len, reverse=True)
    progress = Progress(sum(map(len, order)), "tokens")
    waiting: deque[Future[list[Part]]] = deque()
    parts: list[Part] = []
    with ThreadPoolExecutor(max_workers=WRITERS) as writers:
        states = opened.capture_all(TokenLists(order))
        for number, (position, captured) in enumerate(named(states, order, job), 1):
            sample = order[position]
            logprob = findings.logprobs.get(sample.sample_id)
            waiting.append(writers.submit(judge_and_write, job, sample, captured, due, logprob))
            while waiting and (waiting[0].done() or len(waiting) > WRITERS + QUEUED):
                parts += waiting.popleft().result()
            progress.update(len(sample), f"{number}/{len(order)} samples")
        for future in waiting:
            parts += future.result()
    progress.finish(f"{len(order)}/{len(order)} samples")
    return {Key(part["sample_id"], part["format"]): part for part in parts}


def named(
    states: Iterator[tuple[int, Captured]], order: Sequence[Sample], job: Job
) -> Iterator[tuple[int, Captured]]:
    """Yield what a backend captures; an error that is about one of the samples gets its name."""
    try:
        yield from states
    except SampleError as error:
        name = f"shard {job.shard.name}, sample {order[error.position].sample_id}"
        error.where = f"{name}; {error.where}" if error.where else name
        raise


def judge_and_write(
    job: Job, sample: Sample, captured: Captured, due: dict[Key, Due], logprob: float | None
) -> list[Part]:
    """Write one sample's files if its states are fit, and return their parts.

    Raises:
        StepError: they are not finite, all zero, or of another size than any in the canary; or the disk is full or
            refuses.
    """
    where = f"shard {job.shard.name}, sample {sample.sample_id}"
    facts = measure(captured, job.shard.layers)
    check_states(facts, where)
    if job.canary is not None:
        check_sizes(facts, job.canary, factor=job.settings["limits"]["rms_factor"], where=where)
    try:
        return write_sample(job.shard, sample, captured, facts, due, logprob)
    except OSError as error:
        raise StepError(
            "what is known of a sample's files could not be recorded",
            where=where,
            expected=f"room in {job.shard.folder}",
            seen=str(error),
            remedy="make room (df -h) or mend the disk, then run again: samples already recorded are kept",
        ) from error


class TokenLists(Sequence[list[int]]):
    """The samples' token ids as lists, each made when it is asked for: all at once they would take nine times the memory."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return TokenLists(self.samples[at])
        return self.samples[at].input_ids.tolist()
