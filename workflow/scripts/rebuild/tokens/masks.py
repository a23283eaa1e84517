"""Token ids and loss masks of whole batches, from the ids that the engine itself returned.

Nothing is rendered or tokenized here, so the mask is exact by construction: what the engine was
given is 0, what it sampled (its stop token included) is 1.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Lists = Any  # pa.ListArray; pyarrow carries no types
Integers = NDArray[np.int64]


def join_ids(prompts: Lists, responses: Lists, max_length: int | None) -> tuple[Lists, Lists]:
    """Return `input_ids` (list<int32>) and `loss_mask` (list<int8>): each row's prompt, then its response.

    Rows longer than `max_length` tokens are cut on the right; None leaves them whole. The two
    arguments have equally many rows and no nulls.
    """
    rows = len(prompts)
    alternate = np.arange(2 * rows).reshape(2, rows).T.ravel()  # prompt 0, response 0, prompt 1, …
    pieces = pa.concat_arrays([prompts, responses]).take(pa.array(alternate))
    lengths = list_lengths(pieces)
    ids = flat_values(pieces)
    mask = np.repeat(np.tile(np.array([0, 1], dtype=np.int8), rows), lengths)
    totals = lengths.reshape(rows, 2).sum(axis=1)
    if max_length is not None and (totals > max_length).any():
        position = np.arange(len(ids)) - np.repeat(row_starts(totals)[:-1], totals)
        ids, mask = ids[position < max_length], mask[position < max_length]
        totals = np.minimum(totals, max_length)
    offsets = pa.array(row_starts(totals), type=pa.int32())
    return (
        pa.ListArray.from_arrays(offsets, pa.array(ids, type=pa.int32())),
        pa.ListArray.from_arrays(offsets, pa.array(mask, type=pa.int8())),
    )


def mask_facts(masks: Lists) -> dict[str, Integers]:
    """Return what the audit needs to know of each mask, one number per row.

    `mask_len` entries, `mask_sum` ones, `mask_first` index of a one (-1 without any), `mask_odd`
    entries that are neither 0 nor 1.
    """
    lengths = list_lengths(masks)
    values = flat_values(masks)
    starts = row_starts(lengths)
    sums = row_sums(values == 1, starts)
    places = np.append(np.flatnonzero(values == 1), 0)  # the 0 is only looked up for empty rows
    return {
        "mask_len": lengths,
        "mask_sum": sums,
        "mask_first": np.where(sums > 0, places[row_starts(sums)[:-1]] - starts[:-1], -1),
        "mask_odd": row_sums((values != 0) & (values != 1), starts),
    }


def list_lengths(lists: Lists) -> Integers:
    """Return the number of entries of each list, 0 for a null."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return np.asarray(lengths, dtype=np.int64)


def flat_values(lists: Lists) -> NDArray[Any]:
    """Return the entries of all lists, one after the other; a null entry becomes -1."""
    values = lists.flatten()
    return np.asarray(pc.fill_null(values, -1).to_numpy(zero_copy_only=False))


def row_starts(lengths: Integers | NDArray[np.bool_]) -> Integers:
    """Return where each row begins in the flat values, and at the end where the last one stops: rows + 1 numbers."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def row_sums(flags: NDArray[np.bool_], starts: Integers) -> Integers:
    """Return how many of the flat `flags` are set in each row."""
    if not flags.any():
        return np.zeros(len(starts) - 1, dtype=np.int64)
    running = row_starts(flags)
    return running[starts[1:]] - running[starts[:-1]]
