"""Numbers that tell of each row's ids whether they repeat themselves, and whether two rows are equal.

Rows come as one flat array and their starts (rows + 1 numbers, `masks.row_starts`); every result has one number a row.
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rebuild.masks import Integers, row_starts

Hashes = NDArray[np.uint64]
Floats = NDArray[np.float32]

GRAM = 8  # ids; natural text hardly ever says eight tokens twice, a loop says nothing else
TAIL = 256  # ids at the end that are also judged for themselves: a loop begins somewhere and never ends
FEWEST = 64  # ids; shorter rows have no room to loop
ODD = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix(values: Hashes) -> Hashes:
    """Return well spread 64-bit hashes of 64-bit values (splitmix64's finalizer, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


def row_hashes(values: NDArray[Any], starts: Integers) -> Hashes:
    """Return a hash of each row's values in their order; 0 for an empty row."""
    lengths = np.diff(starts)
    place = np.arange(len(values)) - np.repeat(starts[:-1], lengths)
    mixed = mix(values.astype(np.uint64) * MULTIPLIERS[1] + place.astype(np.uint64) * ODD)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    return np.where(lengths > 0, sums[starts[1:]] - sums[starts[:-1]] | np.uint64(1), np.uint64(0))


def grams(values: NDArray[Any], starts: Integers, length: int) -> tuple[Hashes, Integers]:
    """Return a hash of every run of `length` values within a row, in order, and the row of each."""
    hashes = np.zeros(max(len(values) - length + 1, 0), dtype=np.uint64)
    wide = values.astype(np.uint64)
    for offset in range(length):
        hashes = hashes * ODD + wide[offset : offset + len(hashes)]
    lengths = np.diff(starts)
    left = np.repeat(starts[1:], lengths) - np.arange(
        len(values)
    )  # values from here to the row's end
    whole = left[: len(hashes)] >= length
    rows = np.repeat(np.arange(len(lengths)), lengths)[: len(hashes)]
    return mix(hashes[whole]), rows[whole]


def repetition(values: NDArray[Any], starts: Integers) -> Floats:
    """Return the share of a row's 8-grams of ids that it has said before, in all of it or in its last 256 ids.

    The larger of the two; 0 for rows of fewer than 64 ids.
    """
    lengths = np.diff(starts)
    tails = np.minimum(lengths, TAIL)
    kept = np.arange(len(values)) >= np.repeat(starts[1:] - tails, lengths)
    shares = np.maximum(
        repeated_share(values, starts), repeated_share(values[kept], row_starts(tails))
    )
    judged: Floats = np.where(lengths >= FEWEST, shares, 0).astype(np.float32)
    return judged


def repeated_share(values: NDArray[Any], starts: Integers) -> Floats:
    """Return the share of each row's 8-grams that are not their first occurrence in the row."""
    rows = len(starts) - 1
    hashes, owner = grams(values, starts, GRAM)
    total = np.bincount(owner, minlength=rows)
    again: Floats = (total - count_distinct(hashes, owner, rows)) / np.maximum(total, 1)
    return again.astype(np.float32)


def count_distinct(hashes: Hashes, owner: Integers, rows: int) -> Integers:
    """Return how many distinct hashes each row owns."""
    # owner in the high bits: a sorted array then has each row's hashes together (40 bits tell a row's grams apart)
    keys = (owner.astype(np.uint64) << np.uint64(40)) | (hashes >> np.uint64(24))
    keys.sort()
    first = np.ones(len(keys), dtype=bool)
    first[1:] = keys[1:] != keys[:-1]
    return np.bincount((keys[first] >> np.uint64(40)).astype(np.int64), minlength=rows)


def compression(values: NDArray[Any], starts: Integers) -> Floats:
    """Return how many times smaller zlib makes each row's ids (32-bit); 1 for rows of fewer than 64 ids.

    It sees what n-grams do not: lists whose entries differ only in their number.
    """
    narrow = np.ascontiguousarray(values, dtype=np.int32)
    ratios = np.ones(len(starts) - 1, dtype=np.float32)
    for row in np.flatnonzero(np.diff(starts) >= FEWEST):
        raw = narrow[starts[row] : starts[row + 1]].tobytes()
        ratios[row] = len(raw) / len(zlib.compress(raw, 1))
    return ratios
