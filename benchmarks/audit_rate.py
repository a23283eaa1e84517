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
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from measuring import demo_model, in_pairs, load, run_child, spread, verdict
from numpy.typing import NDArray

from rebuild.masks import join_ids, list_lengths, row_starts
from rebuild.tables import TOKENIZED, TableWriter
from tests.support.real_shards import clean_data, smollm2, write_data

GOAL_MB = 1000.0
GOAL_S = 120.0
GROUP = 256  # rows, as `tokenize_shard` writes them
FILE_ROWS = 20_000
VOCABULARY = 48_000  # of SmolLM2's 49,152
BEFORE, AFTER, STOP = [1, 4093, 198], [2, 198, 1, 520, 9531, 198], 2  # its chat template's ids
ANSWERS, QUESTIONS = (5.85, 0.6), (3.6, 0.8)  # log-normal: means of 415 and 50 tokens

Told = dict[str, float]


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


def job(*arguments: object) -> Told:
    """Run a job of `data_jobs.py` and return what it says."""
    program = str(Path(__file__).with_name("data_jobs.py"))
    cost = run_child([sys.executable, program, *map(str, arguments)])
    told: Told = json.loads(cost.output.splitlines()[-1])
    return told
