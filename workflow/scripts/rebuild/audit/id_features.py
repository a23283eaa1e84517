"""Numbers that tell of each row's ids whether they repeat themselves, and whether two rows are equal.

Rows come as one flat array and their starts (rows + 1 numbers, `masks.row_starts`); every result has one number a row.
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rebuild.tokens.masks import Integers

Hashes = NDArray[np.uint64]
Floats = NDArray[np.float32]

GRAM = 8  # ids; natural text hardly ever says eight tokens twice, a loop says nothing else
TAIL = 256  # ids at the end that are also judged for themselves: a loop begins somewhere and never ends
FEWEST = 64  # ids; shorter rows have no room to loop
VARIED = 0.4  # distinct ids of a row's; zlib makes rows with more of them at most six times smaller, whatever their order
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
    lengths = np.diff(starts)
    hashes = run_hashes(values.astype(np.uint64), length)
    within = np.ones(len(values), dtype=bool)
    for left in range(1, length):  # runs that begin so few values before the end of their row
        within[starts[1:][lengths >= left] - left] = False
    rows = np.repeat(np.arange(len(lengths)), np.maximum(lengths - length + 1, 0))
    return mix(hashes[within[: len(hashes)]]), rows


def run_hashes(values: Hashes, length: int) -> Hashes:
    """Return for every place where `length` values begin their polynomial in ODD, made of those of half as many."""
    if len(values) < length:
        return values[:0]
    if length == 1:
        return values
    half = length // 2
    part = run_hashes(values, half)
    whole = part[:-half] * np.uint64(pow(int(ODD), half, 1 << 64))
    whole += part[half:]
    return whole[:-1] * ODD + values[2 * half :] if length % 2 else whole


def repetition(values: NDArray[Any], starts: Integers) -> Floats:
    """Return the share of a row's 8-grams of ids that it has said before, in all of it or in its last 256 ids.

    The larger of the two; 0 for rows of fewer than 64 ids.
    """
    lengths = np.diff(starts)
    hashes, owner = grams(values, starts, GRAM)
    ends = np.cumsum(np.maximum(lengths - GRAM + 1, 0))
    first = np.where(lengths > TAIL, ends - (TAIL - GRAM + 1), ends)  # shorter rows are all tail
    late = np.arange(len(hashes)) >= first[owner]
    shares = np.maximum(
        repeated_share(hashes, owner, len(lengths)),
        repeated_share(hashes[late], owner[late], len(lengths)),
    )
    judged: Floats = np.where(lengths >= FEWEST, shares, 0).astype(np.float32)
    return judged


def repeated_share(hashes: Hashes, owner: Integers, rows: int) -> Floats:
    """Return the share of each row's grams that are not their first occurrence in the row."""
    total = np.bincount(owner, minlength=rows)
    again: Floats = (total - count_distinct(hashes, owner, rows)) / np.maximum(total, 1)
    return again.astype(np.float32)


def count_distinct(hashes: Hashes, owner: Integers, rows: int) -> Integers:
    """Return how many distinct hashes each row owns."""
    # 40 bits tell a row's grams apart
    keys = (owner.astype(np.uint64) << np.uint64(40)) | (hashes >> np.uint64(24))
    return count_keys(keys, 40, rows)


def count_keys(keys: Hashes, bits: int, rows: int) -> Integers:
    """Return how many distinct keys each row has; above its lowest `bits` a key is its row's number. Sorts the keys."""
    keys.sort()  # which puts each row's together
    first = np.ones(len(keys), dtype=bool)
    first[1:] = keys[1:] != keys[:-1]
    return np.bincount((keys[first] >> np.uint64(bits)).astype(np.int64), minlength=rows)


def compression(
    values: NDArray[Any], starts: Integers, suspected: NDArray[np.bool_] | None = None
) -> Floats:
    """Return how many times smaller zlib makes each row's ids (32-bit).

    It sees what n-grams do not: lists whose entries differ only in their number. 1 stands for rows of fewer than 64 ids
    and, unless they are `suspected`, for those of so many different ids that they are no such lists.
    """
    lengths = np.diff(starts)
    alike = distinct_ids(values, starts) <= VARIED * lengths
    if suspected is not None:
        alike |= suspected
    narrow = np.ascontiguousarray(values, dtype=np.int32)
    ratios = np.ones(len(lengths), dtype=np.float32)
    for row in np.flatnonzero(alike & (lengths >= FEWEST)):
        raw = narrow[starts[row] : starts[row + 1]].tobytes()
        ratios[row] = len(raw) / len(zlib.compress(raw, 1))
    return ratios


def distinct_ids(values: NDArray[Any], starts: Integers) -> Integers:
    """Return how many different ids each row has."""
    rows = len(starts) - 1
    owner = np.repeat(np.arange(rows, dtype=np.uint64), np.diff(starts))
    return count_keys((owner << np.uint64(32)) | values.astype(np.uint32), 32, rows)
