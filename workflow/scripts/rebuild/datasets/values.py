"""Lists of whole numbers out of whatever a dataset holds, odd values kept odd so that the audit sees them.

A number that does not fit is moved to the nearest that does, a fraction becomes -1, and what is no number becomes
null: none of them can pass for a token id of the vocabulary or for a 0 or 1 of a mask.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rebuild.tokens.masks import Integers, Lists, list_lengths, row_starts

ODD = -1
UNSUPERVISED = -100  # the label that PyTorch's cross entropy passes over
ELSEWHERE = (
    2  # in a mask made from labels: supervised, but on another token than the one that stands there
)


def holds_numbers(kind: pa.DataType) -> bool:
    """Return whether the type is that of lists of numbers, or of lists of such lists."""
    if pa.types.is_null(kind):
        return True
    if not _is_list(kind):
        return False
    item = kind.value_type
    return _is_number(item) or pa.types.is_null(item) or holds_numbers(item)


def arrow_lists(column: Lists, item: pa.DataType) -> Lists:
    """Return a column of lists, of which `holds_numbers` is true, as list<item>; [1, S] counts as [S].

    A row of several lists, as of a batch, becomes null.
    """
    while _is_list(column.type) and _is_list(column.type.value_type):
        column = _only_list(column)
    try:
        return column.cast(pa.list_(item))
    except pa.ArrowInvalid:
        return _join(
            _nearest(column.flatten(), item), list_lengths(column), pc.is_null(column), item
        )


def python_lists(values: Sequence[Any], item: pa.DataType) -> Lists:
    """Return Python values, one a row, as list<item>; [1, S] counts as [S]."""
    if {type(value) for value in values} <= {list}:
        flat = list(chain.from_iterable(values))
        if set(map(type, flat)) <= {int, bool}:
            lengths = np.fromiter(map(len, values), np.int64, len(values))
            try:
                numbers = np.fromiter(flat, item.to_pandas_dtype(), len(flat))
                return _join(pa.array(numbers), lengths, None, item)
            except OverflowError:
                pass  # too large a number: found below
    return pa.array([_numbers(value, item) for value in values], pa.list_(item))


def mask_of_labels(labels: Lists, ids: Lists) -> Lists:
    """Return the mask of labels: 0 where a label is -100, 1 where it is the id in its place, else 2.

    `labels` is list<int64>, `ids` list<int32>. Labels that are shifted against their ids so show as twos.
    """
    lengths, id_lengths = list_lengths(labels), list_lengths(ids)
    wanted = _filled(labels)
    there = np.append(_filled(ids), ODD)
    place = np.arange(len(wanted)) - np.repeat(row_starts(lengths)[:-1], lengths)
    inside = place < np.repeat(id_lengths, lengths)
    start = np.repeat(row_starts(id_lengths)[:-1], lengths)
    same = wanted == there[np.where(inside, start + place, len(there) - 1)]
    mask = np.where(wanted == UNSUPERVISED, 0, np.where(same & inside, 1, ELSEWHERE))
    values = pa.array(mask.astype(np.int8))
    return _join(values, lengths, pc.is_null(labels), pa.int8())


def _filled(lists: Lists) -> Integers:
    values = pc.fill_null(lists.flatten(), ODD).to_numpy(zero_copy_only=False)
    return np.asarray(values, dtype=np.int64)


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _only_list(column: Lists) -> Lists:
    """Return the one list that each row holds, null for a row that holds none or several."""
    single = np.asarray(pc.equal(pc.list_value_length(column), 1).fill_null(False))
    inner = column.filter(pa.array(single)).flatten()
    return inner.take(pa.array(np.cumsum(single) - 1, mask=~single))


def _nearest(values: Any, item: pa.DataType) -> Any:
    """Return the flat values as `item`, changed as the head of this module says."""
    kind = item.to_pandas_dtype()
    raw = pc.fill_null(values, False if pa.types.is_boolean(values.type) else 0)
    numbers = raw.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "f":
        numbers = np.where(np.isfinite(numbers) & (numbers == np.floor(numbers)), numbers, ODD)
    if numbers.dtype.kind != "b":
        numbers = np.minimum(numbers, np.iinfo(kind).max)
    if numbers.dtype.kind in "if":
        numbers = np.maximum(numbers, np.iinfo(kind).min)
    return pa.array(numbers.astype(kind), mask=np.asarray(pc.is_null(values)))


def _join(values: Any, lengths: Integers, nulls: Any, item: pa.DataType) -> Lists:
    offsets = pa.array(row_starts(lengths), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=pa.list_(item), mask=nulls)


def _numbers(value: Any, item: pa.DataType) -> list[int | None] | None:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or any(isinstance(entry, list) for entry in value):
        return None
    return [_number(entry, item) for entry in value]


def _number(entry: Any, item: pa.DataType) -> int | None:
    if not isinstance(entry, int | float):
        return None
    if entry != entry or (isinstance(entry, float) and not entry.is_integer()):
        return ODD  # inf is no integer either
    bounds = np.iinfo(item.to_pandas_dtype())
    return min(max(int(entry), int(bounds.min)), int(bounds.max))
