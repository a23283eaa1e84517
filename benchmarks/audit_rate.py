"""What the audit costs: a million rows of a data set, and a shard judged with its model, beside reading the same files.

    python benchmarks/audit_rate.py [--rows 1000000] [--shard-rows 20000] [--decoded-rows 20000] [--rounds 3]

Measured: `audit_dataset` on tokenized shards as this workflow writes them, without a tokenizer: time, CPU time and peak
memory; the same on fewer rows with the demo model's tokenizer, which decodes every answer; and `audit_shard` on a
generated shard with its target model. Against: reading all columns of the same files with pyarrow, in pairs.
The rows are synthetic: random ids as frequent as words are (Zipf), of lengths as answers have (log-normal, about 500
tokens a row). Making them is not measured, and each job is a process of its own. Goals: peak memory under 1 GB, a
million rows in 120 s.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from measuring import Told, demo_model, in_pairs, load, run_job, spread, verdict
from numpy.typing import NDArray

from rebuild.tables import TOKENIZED, TableWriter
from rebuild.tokens.masks import join_ids, list_lengths, row_starts
from tests.support.real_shards import clean_data, smollm2, write_data

GOAL_MB = 1000.0
GOAL_S = 120.0
GROUP = 256  # rows, as `tokenize_shard` writes them
FILE_ROWS = 20_000
VOCABULARY = 48_000  # of SmolLM2's 49,152
BEFORE, AFTER, STOP = [1, 4093, 198], [2, 198, 1, 520, 9531, 198], 2  # its chat template's ids
ANSWERS, QUESTIONS = (5.85, 0.6), (3.6, 0.8)  # log-normal: means of 415 and 50 tokens


def write_rows(folder: Path, rows: int, seed: int = 0) -> Path:
    """Write tokenized shards of synthetic rows and return their folder."""
    chance = np.random.default_rng(seed)
    words = frequent_ids()
    folder.mkdir(parents=True)
    for start in range(0, rows, FILE_ROWS):
        path = folder / f"{start // FILE_ROWS:05d}.parquet"
        with TableWriter(path, TOKENIZED, {"fingerprint": "benchmark"}, GROUP) as writer:
            for first in range(start, min(start + FILE_ROWS, rows), GROUP):
                last = min(first + GROUP, start + FILE_ROWS, rows)
                writer.write_table(make_rows(chance, words, first, last))
    return folder


def frequent_ids() -> NDArray[np.int32]:
    """Return a million ids of which every rank is as frequent as words of that rank are, shuffled over the vocabulary."""
    ranks = np.arange(1, VOCABULARY + 1)
    shares = 1 / (ranks + 2.7)  # Mandelbrot's form of Zipf's law
    counts = np.rint(shares / shares.sum() * 2**20).astype(np.int64)
    ids = 100 + np.random.default_rng(0).permutation(VOCABULARY)
    return np.repeat(ids, counts).astype(np.int32)


def make_rows(
    chance: np.random.Generator, words: NDArray[np.int32], first: int, last: int
) -> pa.Table:
    """Return the rows number `first` to `last`, as `tokenize_shard` makes them."""
    count = last - first
    asked = make_lists(chance, words, count, QUESTIONS, BEFORE, AFTER)
    said = make_lists(chance, words, count, ANSWERS, [], [STOP])
    ids, mask = join_ids(asked, said, None)
    columns = {
        "sample_id": [f"{number:016x}_gen0" for number in range(first, last)],
        "prompt_id": [f"{number:016x}" for number in range(first, last)],
        "turn": np.zeros(count, np.int32),
        "source": ["books" if number % 3 else "letters" for number in range(first, last)],
        "input_ids": ids,
        "loss_mask": mask,
        "seq_len": list_lengths(ids).astype(np.int32),
        "loss_tokens": list_lengths(said).astype(np.int32),
        "mask_origin": ["engine"] * count,
        "finish_reason": ["stop"] * count,
    }
    return pa.table(columns, schema=TOKENIZED)


def make_lists(
    chance: np.random.Generator,
    words: NDArray[np.int32],
    count: int,
    shape: tuple[float, float],
    head: list[int],
    tail: list[int],
) -> pa.ListArray:
    """Return lists of ids of log-normal length, each between `head` and `tail`."""
    lengths = np.clip(np.rint(chance.lognormal(*shape, count)), 8, 4096).astype(np.int64)
    starts = row_starts(lengths + len(head) + len(tail))
    ids = words[chance.integers(0, len(words), starts[-1])]
    for place, token in enumerate(head):
        ids[starts[:-1] + place] = token
    for place, token in enumerate(tail):
        ids[starts[1:] - len(tail) + place] = token
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(ids, pa.int32()))


def write_shard(folder: Path, rows: int, model: Path) -> Path:
    """Write a shard of a run, with answers of several paragraphs by SmolLM2's tokenizer, and return the run's folder."""
    return write_data(folder, clean_data(smollm2(model), rows)).run


def look(rounds: int, files: list[Path], rows: int, *audit: object) -> list[tuple[Told, Told]]:
    """Audit and read the same files, in pairs.

    Raises:
        RuntimeError: rows were lost, or clean ones condemned.
    """
    pairs = in_pairs(rounds, lambda: run_job(*audit), lambda: run_job("read", *files))
    for judged, _ in pairs:
        if (judged["rows"], judged["verdict"]) != (rows, "pass"):
            raise RuntimeError(f"{rows} clean rows were to be judged: {judged}")
    return pairs


def files(folder: Path) -> list[Path]:
    """Return the Parquet files below a folder, but for what an audit wrote."""
    return [file for file in sorted(folder.rglob("*.parquet")) if file.parent.name != "audit"]


def line(title: str, pairs: list[tuple[Told, Told]]) -> str:
    """Return a line of the table."""
    judged, read = zip(*pairs, strict=True)
    rows = judged[0]["rows"]
    times = [mine["wall_s"] / other["wall_s"] for mine, other in pairs]
    cells = [
        f"{rows:,}",
        spread([run["wall_s"] for run in judged], 1),
        spread([rows / run["wall_s"] for run in judged], 0),
        spread([1e6 * run["cpu_s"] / rows for run in judged], 0),
        spread([run["peak_mb"] for run in judged], 0),
        spread([run["wall_s"] for run in read], 2),
        spread(times, 1),
    ]
    return f"| {' | '.join([title, *cells])} |"


def goals(pairs: list[tuple[Told, Told]]) -> str:
    """Return how the audit of the large set stands to its goals."""
    peaks = [-run["peak_mb"] for run, _ in pairs]
    seconds = [-1e6 * run["wall_s"] / run["rows"] for run, _ in pairs]
    million = spread([-value for value in seconds], 0)
    return (
        f"Peak memory under {GOAL_MB:.0f} MB: {verdict(peaks, -GOAL_MB)}. "
        f"A million rows take {million} s, goal {GOAL_S:.0f}: {verdict(seconds, -GOAL_S)}."
    )


def measure(
    folder: Path,
    rows: int,
    decoded_rows: int,
    shard_rows: int,
    rounds: int,
    threads: int,
    model: Path,
) -> str:
    """Return the table of a measurement and what it says of the goals."""
    evidence = folder / "evidence.json"
    large = write_rows(folder / "large", rows)
    whole = look(rounds, files(large), rows, "audit-set", large, evidence, threads)
    decoded = write_rows(folder / "decoded", decoded_rows, seed=1)
    texts = look(
        rounds, files(decoded), decoded_rows, "audit-set", decoded, evidence, threads, model
    )
    run = write_shard(folder / "run", shard_rows, model)
    shard = look(rounds, files(run), shard_rows, "audit-shard", run, model)
    return "\n".join(
        [
            "| | rows | audit, s | rows/s | CPU µs a row | peak memory, MB | just reading, s | audit ÷ reading |",
            "|---|---|---|---|---|---|---|---|",
            line("`audit_dataset`, ids alone", whole),
            line("`audit_dataset`, answers decoded", texts),
            line("`audit_shard` with its model", shard),
            "",
            goals(whole),
        ]
    )


def main() -> None:
    """Print the section of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--decoded-rows", type=int, default=20_000)
    parser.add_argument("--shard-rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--model", type=Path, help="a model's folder instead of the demo's")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sizes = (given.rows, given.decoded_rows, given.shard_rows, given.rounds, given.threads)
        lines = measure(Path(name), *sizes, demo_model(given.model))
    print("\n## What the audit costs (`audit_rate.py`)\n")
    print(f"{given.rounds} pairs, {given.threads} threads; load {load()} at the end.\n")
    print(lines)


if __name__ == "__main__":
    main()
