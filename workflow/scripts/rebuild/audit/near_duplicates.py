"""Finds texts that are nearly the same among very many: min-hash sketches, compared where they share a band.

Broder 1997 (resemblance), Li, Owen & Zhang 2012 (one permutation), Leskovec et al., Mining of Massive Datasets, ch. 3.
"""

import numpy as np
from numpy.typing import NDArray

from rebuild.audit.id_features import Hashes, grams, mix
from rebuild.tokens.masks import Integers, row_starts

Sketches = NDArray[np.uint32]

BINS = 16
BANDS = 4
GRAM_BYTES = 12  # about two words
EMPTY = np.uint32(0xFFFFFFFF)
NEAR = 0.75  # share of equal bins, an estimate of the share of common grams


def sketch_texts(texts: list[str]) -> Sketches:
    """Return the sketch of each text [texts, 16]; case and white space do not count.

    Bin b holds the smallest hash of the text's 12-byte grams that fall into it. A text shorter than a gram has an
    empty sketch.
    """
    squeezed = [" ".join(text.lower().split()).encode("utf-8", "replace") for text in texts]
    starts = row_starts(np.array([len(text) for text in squeezed], dtype=np.int64))
    return sketch_rows(np.frombuffer(b"".join(squeezed), dtype=np.uint8), starts, GRAM_BYTES)


def sketch_rows(
    values: NDArray[np.generic], starts: Integers, gram: int, *, boilerplate: bool = False
) -> Sketches:
    """Return the sketch of each row of values, of its runs of `gram` values.

    With `boilerplate`, runs that occur more than once for every five rows are left out: they are the chat template, or
    a system prompt that all rows begin with.
    """
    sketches = np.full((len(starts) - 1, BINS), EMPTY, dtype=np.uint32)
    hashes, owner = grams(values, starts, gram)
    if boilerplate:
        _, which, times = np.unique(hashes, return_inverse=True, return_counts=True)
        rare = times[which] <= max(1, len(sketches) // 5)
        hashes, owner = hashes[rare], owner[rare]
    place = owner * BINS + (hashes >> np.uint64(60)).astype(np.int64)
    np.minimum.at(sketches.reshape(-1), place, (hashes & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    return sketches


def near_copies(sketches: Sketches) -> Integers:
    """Return for each row the first row before it that it is nearly equal to, -1 for none.

    Rows are compared with the first one that shares a band (4 bins) with them.
    """
    rows = np.arange(len(sketches))
    nearest = np.full(len(sketches), -1, dtype=np.int64)
    for band in range(BANDS):
        keys, told = band_keys(sketches, band)
        members = rows[told]
        _, first, group = np.unique(keys[told], return_index=True, return_inverse=True)
        leader = members[first][group]  # np.unique returns the first of equals
        near = (leader != members) & is_near(sketches[leader], sketches[members])
        found, leader = members[near], leader[near]
        better = (nearest[found] < 0) | (leader < nearest[found])
        nearest[found[better]] = leader[better]
    return nearest


def band_keys(sketches: Sketches, band: int) -> tuple[Hashes, NDArray[np.bool_]]:
    """Return a hash of one band of each sketch, and whether enough of the sketch is filled to tell anything."""
    width = BINS // BANDS
    part = sketches[:, band * width : (band + 1) * width].astype(np.uint64)
    key = np.zeros(len(sketches), dtype=np.uint64)
    for column in range(width):
        key = mix(key + part[:, column])
    filled = (sketches != EMPTY).sum(axis=1) >= BINS // 2
    return key, filled & (part != EMPTY).any(axis=1)


def is_near(left: Sketches, right: Sketches) -> NDArray[np.bool_]:
    """Tell which pairs of sketches agree in at least 75 % of the bins that either of them fills."""
    filled = ((left != EMPTY) | (right != EMPTY)).sum(axis=1)
    equal = ((left == right) & (left != EMPTY)).sum(axis=1)
    near: NDArray[np.bool_] = equal >= NEAR * filled
    return near
