"""How fast hidden states reach the disk in every format, beside a plain sequential write of the same bytes with fsync.

    python benchmarks/write_rate.py [--tokens 2048] [--files 4] [--rounds 9] [--folder .cache]

Measured: from what was captured of a sample (5 layers of 5,120 bfloat16 values, 3 for EAGLE-3, and the final states) to
a file that is on the disk under its name, its checksum known. Against: the same bytes, ready in memory, written to a new
file at once and forced to the disk. In pairs, by one thread and by two, each file another one. Goal: 0.9 of the plain
write. Besides: how fast one core makes a SHA-256, beyond which no file with a checksum is written by one thread.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from measuring import in_pairs, load, spread, verdict

from rebuild.formats.catalog import FORMATS
from rebuild.formats.needs import NEEDS
from tests.support.captured import make_captured, make_sample

GOAL = 0.9
LAYERS, HIDDEN = 5, 5120


class Rate(NamedTuple):
    """One side of a pair: MB/s, and the CPU seconds that this process took for a GB."""

    megabytes_per_s: float
    cpu_s: float


def write_files(
    write: Callable[[Path], None], folder: Path, files: int, threads: int, size: int
) -> Rate:
    """Have `threads` write `files` new files of `size` bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()
    with ThreadPoolExecutor(threads) as pool:
        began, cpu = time.perf_counter(), time.process_time()
        list(pool.map(write, [folder / str(number) for number in range(files)]))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    shutil.rmtree(folder)
    return Rate(files * size / seconds / 1e6, cpu / (files * size / 1e9))


def write_plainly(path: Path, content: bytes) -> None:
    """Write bytes to a new file and force them to the disk."""
    with open(path, "wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())


def hash_rate(megabytes: int = 100) -> float:
    """Return the MB/s of a SHA-256."""
    content = bytes(megabytes * 1_000_000)
    began = time.perf_counter()
    hashlib.sha256(content)
    return megabytes / (time.perf_counter() - began)


def measure(name: str, folder: Path, tokens: int, files: int, rounds: int, threads: int) -> str:
    """Return the table's line for a format."""
    kind = FORMATS[name]
    sample = make_sample(length=tokens)
    captured = make_captured(tokens, NEEDS[name].taps or LAYERS, HIDDEN)

    def write(path: Path) -> None:
        kind.write(path, kind.tensors(sample, captured, "none"))

    write(folder / "once")
    content = (folder / "once").read_bytes()
    (folder / "once").unlink()
    pairs = in_pairs(
        rounds,
        lambda: write_files(write, folder / "ours", files, threads, len(content)),
        lambda: write_files(
            lambda path: write_plainly(path, content),
            folder / "plain",
            files,
            threads,
            len(content),
        ),
    )
    ratios = [ours.megabytes_per_s / plain.megabytes_per_s for ours, plain in pairs]
    sides = list(zip(*pairs, strict=True))
    rates = [spread([rate.megabytes_per_s for rate in side], 0) for side in sides]
    cpu = [spread([rate.cpu_s for rate in side]) for side in sides]
    cells = [name, str(threads), f"{len(content) / 1e6:.0f}", *rates, *cpu]
    return f"| {' | '.join([*cells, spread(ratios), verdict(ratios, GOAL)])} |"


def main() -> None:
    """Print the section of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=".cache", help="on the disk to be measured")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    given = parser.parse_args()
    print("\n## Writing hidden states (`write_rate.py`)\n")
    print(f"{given.files} files of {given.tokens:,} tokens, {given.rounds} pairs.\n")
    print(
        "| format | threads | MB a file | MB/s | plain write, MB/s | CPU s a GB | plain write, CPU s a GB "
        "| ours ÷ plain | goal 0.9 |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        sizes = (given.tokens, given.files, given.rounds)
        for threads in given.threads:
            for kind in given.formats:
                print(measure(kind, Path(name), *sizes, threads), flush=True)
    hashing = spread([hash_rate() for _ in range(given.rounds)], 0)
    print(f"\nSHA-256 alone: {hashing} MB/s; load {load()} at the end.")


if __name__ == "__main__":
    main()
