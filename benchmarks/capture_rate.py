"""Tokens/s of capturing hidden states, beside the bare forward, a padded loop, and the engine; and what memory it takes.

    python benchmarks/capture_rate.py [--samples 24] [--rounds 5] [--dtype bfloat16] [--threads N] [--sizes 60 600]

On the CPU. Samples of 24 to 1,400 tokens, their lengths evenly spaced on a logarithmic scale and shuffled, random ids.
Models are loaded before; in each round every side takes all samples, each time another one first. The sides:

- ours: `rebuild.capture`, the layers that `layers: auto` chooses, of the model cut off after the last of them; the
  longest sample first and each alone, as a job does.
- bare: the forward of that same cut model on the same samples in the same order, of which nothing is kept.
- padded: the loop that is often written for this: the whole causal model with `output_hidden_states=True` on batches of
  `--batch` samples in the given order, padded on the right to the longest, of which the layers are then taken.
- SGLang against ours, both in float32, on every other sample: a server that captures, several samples at once. It
  stands still while ours is measured; its start is shown apart.

`--threads` are torch's in this process, by default as many as there are cores. Where others use the cores, 1 it should
be: several threads wait for one another at every layer, and whoever is interrupted makes all of them late.

Memory is that of `extract_hidden_states` on shards of some samples and of many, of the same lengths, with a small random
model; each job is a process of its own. Goals in tokens/s: ours ÷ bare 0.95, ours ÷ padded 3; in memory, many samples ÷
some at most 1.1.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import ROOT, Told, demo_model, in_turns, load, run_job, spread, verdict
from torch import Tensor
from transformers import AutoModelForCausalLM

from rebuild.capture.batches import capture_all
from rebuild.capture.engine import engine_capture
from rebuild.capture.forward import pad_right
from rebuild.capture.model import DTYPES, Target, cut, load_whole
from rebuild.model.manifest import describe_config
from rebuild.serving.devices import select_devices
from rebuild.serving.installed_flags import translate_flags
from rebuild.serving.lease import lease_devices
from rebuild.states.captured import CaptureAll, Wanted
from rebuild.states.layers import choose_layers

BARE_GOAL, PADDED_GOAL, FLAT = 0.95, 3.0, 1.1
SHORTEST, LONGEST = 24, 1400
STAND_IN = ROOT / "envs" / "cpu" / "stand_in"
READY_S, STALL_S = 1800.0, 600.0
SIDES = {
    "ours": "ours, one sample at a time",
    "bare": "bare forward of the cut model",
    "padded": "padded, `output_hidden_states`",
    "alone": "transformers, one sample at a time",
    "engine": "SGLang, several samples at once",
}

Ids = list[int]


def mixed_lengths(count: int) -> list[int]:
    """Return lengths from SHORTEST to LONGEST, evenly spaced on a logarithmic scale, in an order of chance."""
    ratio = (LONGEST / SHORTEST) ** (1 / (count - 1))
    lengths = [round(SHORTEST * ratio**number) for number in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


def make_samples(count: int, vocabulary: int) -> list[Ids]:
    """Return samples of random ids."""
    chance = random.Random(1)
    return [[chance.randrange(vocabulary) for _ in range(n)] for n in mixed_lengths(count)]


def longest_first(samples: Sequence[Ids]) -> list[Ids]:
    """Return the samples in the order in which a job captures them."""
    return sorted(samples, key=len, reverse=True)


def clock(work: Callable[[], Iterable[int]]) -> Told:
    """Do the work, which yields the tokens of each part of it; return tokens, wall seconds and CPU seconds."""
    began, cpu = time.perf_counter(), cpu_seconds()
    tokens = sum(work())
    return {
        "tokens": tokens,
        "wall_s": time.perf_counter() - began,
        "cpu_s": cpu_seconds() - cpu,
    }


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and of its children that live, a server's among them."""
    this = psutil.Process()
    times = [process.cpu_times() for process in [this, *this.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


def take(capture: CaptureAll, samples: Sequence[Ids]) -> Iterator[int]:
    """Capture the samples, as a job does, and let go of their states."""
    for _, captured in capture(longest_first(samples)):
        yield len(captured.taps)


def capture_alone(target: Target) -> CaptureAll:
    """Return what captures with transformers, one sample at a time."""
    return lambda samples: capture_all(target, samples)


def run_bare(target: Target, samples: Sequence[Ids]) -> Iterator[int]:
    """Run the cut model over the samples and keep nothing."""
    for ids in longest_first(samples):
        with torch.inference_mode():
            target.decoder(input_ids=pad_right([ids]), use_cache=False)
        yield len(ids)


def padded_states(
    model: Any, samples: Sequence[Ids], layers: Sequence[int], batch: int
) -> Iterator[Tensor]:
    """Yield the layers' states [S, D·H] of each sample, from batches padded on the right."""
    for start in range(0, len(samples), batch):
        some = samples[start : start + batch]
        lengths = [len(ids) for ids in some]
        mask = pad_right([[1] * length for length in lengths])
        with torch.inference_mode():
            output = model(
                input_ids=pad_right(some),
                attention_mask=mask,
                output_hidden_states=True,
                use_cache=False,
            )
            states = torch.cat([output.hidden_states[layer + 1] for layer in layers], dim=-1)
        for row, length in enumerate(lengths):
            yield states[row, :length].clone()


def load_cut(model: Path, dtype: str, wanted: Wanted) -> Target:
    """Load the model and cut it down to what is wanted."""
    return cut(load_whole(model, dtype=dtype, devices=["cpu"]), wanted)


def beside_forwards(
    model: Path, samples: Sequence[Ids], rounds: int, batch: int, dtype: str, wanted: Wanted
) -> dict[str, list[Told]]:
    """Return what ours, the bare forward and the padded loop told, round by round."""
    target = load_cut(model, dtype, wanted)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]).eval()
    ours = capture_alone(target)

    def sides(some: Sequence[Ids]) -> dict[str, Callable[[], Told]]:
        return {
            "ours": lambda: clock(lambda: take(ours, some)),
            "bare": lambda: clock(lambda: run_bare(target, some)),
            "padded": lambda: clock(
                lambda: map(len, padded_states(whole, some, wanted.layers, batch))
            ),
        }

    warm_up(sides(samples[:2]))
    return in_turns(rounds, sides(samples))


def beside_engine(
    model: Path, samples: Sequence[Ids], rounds: int, folder: Path, wanted: Wanted
) -> tuple[dict[str, list[Told]], float]:
    """Return what the two backends told, round by round, and the seconds until the server was ready."""
    alone = capture_alone(load_cut(model, "float32", wanted))
    began = time.monotonic()
    with capturing_server(model, folder, wanted) as engine:
        ready_s = time.monotonic() - began

        def sides(some: Sequence[Ids]) -> dict[str, Callable[[], Told]]:
            return {
                "alone": with_children_paused(lambda: clock(lambda: take(alone, some))),
                "engine": lambda: clock(lambda: take(engine, some)),
            }

        warm_up(sides(samples[:2]))
        return in_turns(rounds, sides(samples)), ready_s


@contextmanager
def capturing_server(model: Path, folder: Path, wanted: Wanted) -> Iterator[CaptureAll]:
    """Start a server that captures, as a job does."""
    manifest = describe_config(model, None) | {"path": str(model), "trust_remote_code": False}
    with lease_devices(1, select_devices(["cpu"]), folder=folder / "leases") as lease:
        flags = translate_flags({}, lease.devices, STAND_IN, folder / "installed_flags.json")
        with engine_capture(
            manifest,
            wanted=wanted,
            flags=flags,
            tensor_parallel=1,
            lease=lease,
            stand_in=STAND_IN,
            logs=folder / "logs",
            scratch=folder / "scratch",
            longest=LONGEST,
            ready_s=READY_S,
            stall_s=STALL_S,
        ) as engine:
            yield engine


def with_children_paused(side: Callable[[], Told]) -> Callable[[], Told]:
    """Return what runs a side while a server that has nothing to do stands still: it would look for work all the time."""

    def run() -> Told:
        children = psutil.Process().children(recursive=True)
        for child in children:
            child.suspend()
        try:
            return side()
        finally:
            for child in children:
                child.resume()

    return run


def warm_up(sides: dict[str, Callable[[], Told]]) -> None:
    """Run every side once."""
    for side in sides.values():
        side()


def check(told: dict[str, list[Told]], tokens: int) -> None:
    """Refuse a measurement in which a side captured fewer tokens.

    Raises:
        RuntimeError: names it.
    """
    for name, runs in told.items():
        if {run["tokens"] for run in runs} != {tokens}:
            raise RuntimeError(
                f"{SIDES[name]}: {[run['tokens'] for run in runs]} tokens of {tokens}"
            )


def table(told: dict[str, list[Told]]) -> str:
    """Return the lines that set sides beside each other."""
    lines = ["| | tokens/s | CPU ms a token |", "|---|---|---|"]
    for name, runs in told.items():
        rates = spread([run["tokens"] / run["wall_s"] for run in runs], 0)
        cpu = spread([1e3 * run["cpu_s"] / run["tokens"] for run in runs])
        lines.append(f"| {SIDES[name]} | {rates} | {cpu} |")
    return "\n".join(lines)


def quotients(told: dict[str, list[Told]], ours: str, other: str, cost: str) -> list[float]:
    """Return how many times as much the other side took, round by round."""
    return [theirs[cost] / mine[cost] for mine, theirs in zip(told[ours], told[other], strict=True)]


def ratios(told: dict[str, list[Told]]) -> str:
    """Return how ours stands to the bare forward and to the padded loop, in tokens/s and in CPU seconds."""
    lines = []
    for other, goal in (("bare", BARE_GOAL), ("padded", PADDED_GOAL)):
        rates, cpu = (quotients(told, "ours", other, cost) for cost in ("wall_s", "cpu_s"))
        lines.append(
            f"- {SIDES['ours']} ÷ {SIDES[other]}: **{spread(rates, 3)}**; goal {goal:g}: {verdict(rates, goal)}; "
            f"by CPU seconds {spread(cpu, 3)}: {verdict(cpu, goal)}"
        )
    return "\n".join(lines)


def engine_ratio(told: dict[str, list[Told]]) -> str:
    """Return how SGLang stands to transformers, in tokens/s and in CPU seconds."""
    rates, cpu = (quotients(told, "engine", "alone", cost) for cost in ("wall_s", "cpu_s"))
    return (
        f"- {SIDES['engine']} ÷ {SIDES['alone']}: **{spread(rates)}**; by CPU seconds {spread(cpu)}"
    )


def memory(folder: Path, sizes: Sequence[int]) -> str:
    """Return the line that tells whether memory depends on the number of samples."""
    peaks = [extract(folder / str(size), size)["peak_mb"] for size in sizes]
    listed = ", ".join(
        f"{size:,} samples {peak:.0f} MB" for size, peak in zip(sizes, peaks, strict=True)
    )
    growth = max(peaks) / min(peaks)
    return f"Peak memory: {listed}: × {growth:.2f}; goal {FLAT}: {verdict([-growth], -FLAT)}."


def extract(folder: Path, samples: int) -> Told:
    """Have a job extract the states of a shard of so many samples.

    Raises:
        RuntimeError: it did not write all of them.
    """
    run_job("write-run", folder, *(samples * mixed_lengths(20))[:samples])
    told = run_job("extract", folder)
    if told["rows"] != samples:
        raise RuntimeError(f"{told['rows']} files of {samples} samples")
    print(f"{samples} samples: {told}, load {load()}", file=sys.stderr, flush=True)
    return told


def main() -> None:
    """Print the section of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="samples of a padded batch")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sizes", type=int, nargs="+", default=[60, 600])
    parser.add_argument("--model", type=Path, help="a model's folder instead of the demo's")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = demo_model(given.model)
    facts = describe_config(model, None)
    samples = make_samples(given.samples, facts["vocab_size"])
    wanted = Wanted(tuple(choose_layers("auto", facts["num_hidden_layers"], eagle3=False)))
    with tempfile.TemporaryDirectory() as name:
        forwards = beside_forwards(model, samples, given.rounds, given.batch, given.dtype, wanted)
        half = samples[::2]
        backends, ready_s = beside_engine(model, half, given.rounds, Path(name), wanted)
        flat = memory(Path(name), given.sizes)
    check(forwards, sum(map(len, samples)))
    check(backends, sum(map(len, half)))
    print("\n## Capturing hidden states (`capture_rate.py`)\n")
    print(
        f"{given.samples} samples of {SHORTEST} to {LONGEST:,} tokens, {sum(map(len, samples)):,} in all; layers "
        f"{list(wanted.layers)} of {facts['num_hidden_layers']}, {given.dtype}, {given.threads} threads; {given.rounds} rounds; "
        f"load {load()} at the end.\n"
    )
    print(f"{table(forwards)}\n\n{ratios(forwards)}\n")
    print(
        f"The two backends, float32, {sum(map(len, half)):,} tokens; server ready after {ready_s:.1f} s:\n"
    )
    print(f"{table(backends)}\n\n{engine_ratio(backends)}\n\n{flat}")


if __name__ == "__main__":
    main()
