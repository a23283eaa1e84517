"""Accepted prompts on disk between the two passes, and which of them belong to which shard."""

import os
import tempfile
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from rebuild.errors import StepError


class Spill:
    """Records in an unnamed file, appended in order and read by number; holds 8 bytes of memory for each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ends = array("Q", [0])

    def __enter__(self) -> Self:
        self.file = tempfile.TemporaryFile(dir=self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()

    def __len__(self) -> int:
        return len(self.ends) - 1

    def append(self, record: bytes) -> None:
        """Add a record; it can be read after `flush`."""
        self.file.write(record)
        self.ends.append(self.ends[-1] + len(record))

    def flush(self) -> None:
        """Make all records readable."""
        self.file.flush()

    def size(self, number: int) -> int:
        """Return the bytes of record `number`."""
        return self.ends[number + 1] - self.ends[number]

    def read(self, number: int) -> bytes:
        """Return record `number`."""
        return os.pread(self.file.fileno(), self.size(number), self.ends[number])


def check_enough(count: int, shards: int, canary: int) -> None:
    """Stop where `count` prompts are too few for the canary and at least one in each shard.

    Raises:
        StepError: says how many are needed.
    """
    if count < canary + shards:
        raise StepError(
            "there are too few prompts for the shards",
            expected=f"at least {canary + shards} accepted prompts: one for each of {shards} shards"
            + (f", and {canary} for the canary" if canary else ""),
            seen=f"{count} accepted prompts",
            remedy="lower `prompts.shards` or `plan.canary`, raise `prompts.limit`, or give more prompts",
        )


def rows_without(count: int, taken: Sequence[int]) -> Sequence[int]:
    """Return the row numbers below `count` that are not in `taken`, in order, 8 bytes each."""
    if not taken:
        return range(count)
    gone = set(taken)
    return array("Q", (number for number in range(count) if number not in gone))


def assign_rows(rows: Sequence[int], shards: int, assign: str) -> list[Sequence[int]]:
    """Return the row numbers of each shard.

    `interleave` deals them out (the i-th to shard i mod shards); `contiguous` cuts them into runs whose
    lengths differ by one at most. With at least as many rows as shards, no shard is empty.

    Raises:
        StepError: an assignment of another name.
    """
    if assign == "interleave":
        return [rows[shard::shards] for shard in range(shards)]
    if assign == "contiguous":
        cuts = [shard * len(rows) // shards for shard in range(shards + 1)]
        return [rows[start:end] for start, end in pairwise(cuts)]
    raise StepError(
        "unknown way of assigning prompts to shards",
        expected="interleave or contiguous",
        seen=assign,
        remedy="set `prompts.assign` in the config",
    )
