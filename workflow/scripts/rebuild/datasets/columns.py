"""Where a tokenized dataset keeps what the audit reads, and its rows in the columns of this workflow."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rebuild.datasets.values import (
    arrow_lists,
    holds_numbers,
    mask_of_labels,
    python_lists,
)
from rebuild.errors import StepError
from rebuild.tables import TOKENIZED

DATASET = pa.schema([*TOKENIZED, ("text", pa.string())])
LABELS = "labels"
MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask", LABELS)
# A column of ours, and its names elsewhere, the first that is there being taken; a dot goes into a struct.
NAMES = {
    "sample_id": ("sample_id", "id"),
    "prompt_id": ("prompt_id", "primary_id", "conversation_id"),
    "input_ids": ("input_ids",),
    "loss_mask": MASKS,
    "finish_reason": ("finish_reason", "metadata.finish_reason"),
}
BATCH_TOKENS = 4 << 20
BATCH_ROWS = 2048

Column = Any  # pa.Array; pyarrow carries no types
Batch = Any  # pa.RecordBatch
Places = dict[str, str]


def locate_columns(names: Collection[str], where: Path, text: bool = True) -> Places:
    """Return the place in the dataset of each column of ours that it has; `names` are all of its places.

    Raises:
        StepError: there are no input_ids, or nothing says which tokens are supervised.
    """
    places = {}
    for ours in DATASET.names:
        found = [name for name in NAMES.get(ours, (ours,)) if name in names]
        if found and (text or ours != "text"):
            places[ours] = found[0]
    if "input_ids" not in places:
        raise _lacks("the dataset has no input_ids", "a column input_ids", names, where)
    if "loss_mask" not in places:
        what = "nothing in the dataset says which tokens are supervised"
        if "attention_mask" in names:
            what += " (attention_mask tells padding apart, not answers)"
        raise _lacks(what, f"one of {', '.join(MASKS)}", names, where)
    return places


def rows_per_batch(rows: int, tokens: int) -> int:
    """Return how many rows to read at once where `rows` of them hold `tokens` tokens."""
    return max(1, min(BATCH_ROWS, BATCH_TOKENS * rows // max(tokens, 1)))


def place_names(schema: pa.Schema) -> list[str]:
    """Return the names of an Arrow schema's columns, and of the fields of its structs as `column.field`."""
    inner = [
        f"{field.name}.{part.name}"
        for field in schema
        if pa.types.is_struct(field.type)
        for part in field.type
    ]
    return [*schema.names, *inner]


def check_types(schema: pa.Schema, places: Places, where: Path) -> None:
    """Check that ids and mask are lists of numbers.

    Raises:
        StepError: they are of another type.
    """
    for name in (places["input_ids"], places["loss_mask"]):
        kind = schema.field(name).type
        if not holds_numbers(kind):
            raise StepError(
                f"the column {name} holds no lists of numbers",
                where=str(where),
                expected="list<int>, one entry a token",
                seen=str(kind),
                remedy="write the column as a list of integers in every row",
            )


def from_arrow(batch: Batch, places: Places, name_row: Callable[[int], str]) -> Batch:
    """Return a batch of the dataset's own as one of DATASET; `name_row` names a row that has no id."""
    found = {ours: _pick(batch, place) for ours, place in places.items()}
    ids = arrow_lists(found["input_ids"], pa.int32())
    if places["loss_mask"] == LABELS:
        mask = mask_of_labels(arrow_lists(found["loss_mask"], pa.int64()), ids)
    else:
        mask = arrow_lists(found["loss_mask"], pa.int8())
    plain = {name: _as_type(column, DATASET.field(name).type) for name, column in found.items()
             if name not in ("input_ids", "loss_mask")}  # fmt: skip
    return _assemble(plain | {"input_ids": ids, "loss_mask": mask}, batch.num_rows, name_row)


def from_rows(
    rows: Sequence[Mapping[str, Any]], places: Places, name_row: Callable[[int], str]
) -> Batch:
    """Return rows of JSON's types as a batch of DATASET; `name_row` names a row that has no id."""
    found = {ours: [_look_up(row, place) for row in rows] for ours, place in places.items()}
    ids = python_lists(found.pop("input_ids"), pa.int32())
    mask = found.pop("loss_mask")
    if places["loss_mask"] == LABELS:
        masks = mask_of_labels(python_lists(mask, pa.int64()), ids)
    else:
        masks = python_lists(mask, pa.int8())
    plain = {}
    for name, values in found.items():
        kind = DATASET.field(name).type
        tidy = _text if pa.types.is_string(kind) else _count
        plain[name] = pa.array([tidy(value) for value in values], kind)
    return _assemble(plain | {"input_ids": ids, "loss_mask": masks}, len(rows), name_row)


def _lacks(what: str, expected: str, names: Collection[str], where: Path) -> StepError:
    return StepError(
        what,
        where=str(where),
        expected=expected,
        seen=", ".join(sorted(names)) or "no columns",
        remedy="audit the tokenized set, with its loss mask, or rename the column that holds it",
    )


def _pick(batch: Batch, place: str) -> Column:
    name, _, inner = place.partition(".")
    column = batch.column(name)
    return pc.struct_field(column, inner) if inner else column


def _look_up(row: Mapping[str, Any], place: str) -> Any:
    name, _, inner = place.partition(".")
    value = row.get(name)
    if not inner:
        return value
    return value.get(inner) if isinstance(value, dict) else None


def _as_type(column: Column, kind: pa.DataType) -> Column:
    """Return the column as `kind`; where it cannot be had, one value at a time, null for what does not fit."""
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        tidy = _text if pa.types.is_string(kind) else _count
        return pa.array([tidy(value) for value in column.to_pylist()], kind)


def _text(value: Any) -> str | None:
    """Return the value as text that Arrow can hold: half a surrogate pair becomes a question mark."""
    return None if value is None else str(value).encode("utf-8", "replace").decode("utf-8")


def _count(value: Any) -> int | None:
    fits = isinstance(value, int | float) and abs(value) < 2**31 and value == int(value)
    return int(value) if fits else None


def _assemble(columns: dict[str, Column], rows: int, name_row: Callable[[int], str]) -> Batch:
    names = columns.get("sample_id", pa.nulls(rows, pa.string()))
    if names.null_count:
        missing = names.is_null().to_pylist()
        made = [name_row(number) if null else None for number, null in enumerate(missing)]
        names = pc.coalesce(names, pa.array(made, pa.string()))
    columns = columns | {"sample_id": names}
    arrays = [columns.get(field.name, pa.nulls(rows, field.type)) for field in DATASET]
    return pa.RecordBatch.from_arrays(arrays, schema=DATASET)
