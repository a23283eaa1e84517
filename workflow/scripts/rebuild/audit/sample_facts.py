"""What the audit needs to know of training rows, whoever made them: ids and masks reduced to numbers."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from rebuild.audit.id_features import compression, repetition, row_hashes
from rebuild.tokens.masks import (
    Integers,
    flat_values,
    list_lengths,
    mask_facts,
    row_starts,
    row_sums,
)

TEXTS = ["sample_id", "prompt_id", "source", "finish_reason", "mask_origin"]
COUNTS = ["turn", "seq_len", "loss_tokens"]  # -1 where they are not known


def sample_facts(batch: Any, vocab_size: int | None) -> pd.DataFrame:
    """Return one row for each row of `batch` (a table or record batch with input_ids and loss_mask).

    Those of TEXTS and COUNTS that the batch has (seq_len and loss_tokens are counted where it lacks them); `ids_len`,
    `ids_bad` (negative), `ids_high` (beyond the vocabulary, if its size is known), `last_id`; `masks.mask_facts`;
    `mask_runs` of supervised ids and the `mask_longest` of them; `before_id` ahead of the first supervised id, `end_id`
    the last supervised one, `after_id` behind it (-1 for none); of the supervised ids `answer_key` (a hash), `repetition`
    and `compression` (see `id_features`), of the others `context_key`. Rows whose ids and mask differ in length have
    nothing supervised.
    """
    names = set(batch.schema.names)
    rows = text_columns(batch, [name for name in TEXTS if name in names])
    for name in [name for name in COUNTS if name in names]:
        rows[name] = batch[name].fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    ids, lengths = flat_values(one_array(batch["input_ids"])), list_lengths(batch["input_ids"])
    starts = row_starts(lengths)
    rows["ids_len"] = lengths
    rows["ids_bad"] = row_sums(ids < 0, starts)
    if vocab_size is not None:
        rows["ids_high"] = row_sums(ids >= vocab_size, starts)
    rows["last_id"] = np.where(lengths > 0, np.append(ids, 0)[np.maximum(starts[1:] - 1, 0)], -1)
    masks = one_array(batch["loss_mask"])
    for name, values in mask_facts(masks).items():
        rows[name] = values
    rows["seq_len"] = rows.get("seq_len", lengths)
    rows["loss_tokens"] = rows.get("loss_tokens", rows["mask_sum"])
    supervised = aligned_mask(masks, lengths)
    rows["mask_runs"], rows["mask_longest"] = mask_runs(supervised, starts)
    for name, values in neighbours(ids, supervised, starts).items():
        rows[name] = values
    answers, answer_starts = chosen(ids, supervised, starts)
    context, context_starts = chosen(ids, ~supervised, starts)
    rows["answer_key"] = row_hashes(answers, answer_starts)
    rows["context_key"] = row_hashes(context, context_starts)
    rows["repetition"] = repetition(answers, answer_starts)
    repeating = rows["repetition"].to_numpy() > 0
    rows["compression"] = compression(answers, answer_starts, suspected=repeating)
    return rows


def text_columns(batch: Any, names: list[str]) -> pd.DataFrame:
    """Return columns of text as a frame that keeps them in Arrow's own memory: a million ids are 20 MB, not 80."""
    columns = {name: one_array(batch[name]).cast(pa.string()) for name in names}
    frame: pd.DataFrame = pa.table(columns).to_pandas(
        types_mapper={pa.string(): pd.ArrowDtype(pa.string())}.get
    )
    return frame


def one_array(column: Any) -> Any:
    """Return a column of a table or record batch as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def aligned_mask(masks: Any, lengths: Integers) -> NDArray[np.bool_]:
    """Return for every id whether it is supervised, False in rows that have another number of mask values than ids."""
    values, own = flat_values(masks), list_lengths(masks)
    if np.array_equal(own, lengths):
        return np.asarray(values == 1)
    whole = own == lengths
    aligned = np.zeros(int(lengths.sum()), dtype=bool)
    aligned[np.repeat(whole, lengths)] = values[np.repeat(whole, own)] == 1
    return aligned


def chosen(
    ids: NDArray[Any], flags: NDArray[np.bool_], starts: Integers
) -> tuple[NDArray[Any], Integers]:
    """Return the flagged ids of all rows, and where each row's begin."""
    return ids[flags], row_starts(row_sums(flags, starts))


def neighbours(
    ids: NDArray[Any], flags: NDArray[np.bool_], starts: Integers
) -> dict[str, NDArray[Any]]:
    """Return of each row the id ahead of its first flagged one, its last flagged id, and the one behind that; or -1."""
    counts = row_sums(flags, starts)
    told = counts > 0
    places, ends = np.flatnonzero(flags), row_starts(counts)
    first, last = places[ends[:-1][told]], places[ends[1:][told] - 1]
    padded = np.append(ids, -1)
    found = {
        "before_id": np.where(first > starts[:-1][told], padded[first - 1], -1),
        "end_id": padded[last],
        "after_id": np.where(last + 1 < starts[1:][told], padded[last + 1], -1),
    }
    everywhere = {name: np.full(len(counts), -1, dtype=np.int64) for name in found}
    for name, values in found.items():
        everywhere[name][told] = values
    return everywhere


def mask_runs(flags: NDArray[np.bool_], starts: Integers) -> tuple[Integers, Integers]:
    """Return the number of runs of flagged ids in each row, and the length of the longest."""
    before = np.concatenate([[False], flags[:-1]]) if len(flags) else flags
    before[starts[:-1][np.diff(starts) > 0]] = False  # a row does not go on from the one before
    first = np.flatnonzero(flags & ~before)
    rows = np.searchsorted(starts, first, side="right") - 1
    counts = np.bincount(rows, minlength=len(starts) - 1)
    after = np.concatenate([~flags[1:], [True]]) if len(flags) else flags
    after[starts[1:][np.diff(starts) > 0] - 1] = True
    last = np.flatnonzero(flags & after)
    longest = np.zeros(len(starts) - 1, dtype=np.int64)
    np.maximum.at(longest, rows, last - first + 1)
    return counts, longest
