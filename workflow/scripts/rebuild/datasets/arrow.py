"""Tokenized datasets in Parquet files, and in the Arrow streams that `datasets` saves to disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rebuild.datasets.columns import (
    Batch,
    Places,
    check_types,
    from_arrow,
    locate_columns,
    place_names,
    rows_per_batch,
)
from rebuild.errors import StepError
from rebuild.files import read_json

STATE = "state.json"
SPLITS = "dataset_dict.json"
READ_BYTES = 1 << 20


def parquet_names(file: Path) -> list[str]:
    """Return the places of a Parquet file's columns."""
    with _unharmed(file), pq.ParquetFile(file) as table:
        return place_names(table.schema_arrow)


def parquet_rows(file: Path) -> int:
    """Return the number of rows of a Parquet file, from its footer."""
    with _unharmed(file), pq.ParquetFile(file) as table:
        return int(table.metadata.num_rows)


def read_parquet(file: Path, label: str, text: bool = True) -> Iterator[Batch]:
    """Yield the rows of a Parquet file; one without an id is named `label[row]`, counted from 0."""
    # Read ahead, pyarrow's default, keeps all that it has read: the whole file, in the end.
    with _unharmed(file), pq.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False) as table:
        schema = table.schema_arrow
        places = locate_columns(place_names(schema), file, text)
        check_types(schema, places, file)
        row = 0
        for group in range(table.num_row_groups):
            batches = table.iter_batches(
                batch_size=_rows_at_once(table.metadata.row_group(group), places["input_ids"]),
                row_groups=[group],
                columns=list(places.values()),
            )
            for batch in batches:
                yield from_arrow(batch, places, partial(_name, label, row))
                row += batch.num_rows


def arrow_names(file: Path) -> list[str]:
    """Return the places of an Arrow file's columns."""
    with _unharmed(file), pa.OSFile(str(file)) as handle, _open_stream(handle) as stream:
        return place_names(stream.schema)


def arrow_rows(file: Path) -> int:
    """Return the number of rows of an Arrow file; only the heads of its batches are read from the disk."""
    with _unharmed(file), pa.memory_map(str(file)) as memory, _open_stream(memory) as stream:
        return sum(batch.num_rows for batch in stream)


def read_arrow(file: Path, label: str, text: bool = True, first: int = 0) -> Iterator[Batch]:
    """Yield the rows of an Arrow stream; one without an id is named `label[row]`, counted from `first`."""
    with _unharmed(file), pa.OSFile(str(file)) as handle, _open_stream(handle) as stream:
        places = locate_columns(place_names(stream.schema), file, text)
        check_types(stream.schema, places, file)
        row = first
        for whole in stream:
            for batch in _pieces(whole, places):
                yield from_arrow(batch, places, partial(_name, label, row))
                row += batch.num_rows


def saved_folders(path: Path) -> list[tuple[str, Path]]:
    """Return label and folder of each dataset that `datasets` has saved in `path`: of one, or of every split."""
    if (path / SPLITS).is_file():
        return [(split, path / split) for split in _read_list(path / SPLITS, "splits")]
    return [(path.resolve().name, path)] if (path / STATE).is_file() else []


def saved_files(folder: Path) -> list[Path]:
    """Return a saved dataset's Arrow files in the order of its rows.

    Raises:
        StepError: the state cannot be read, a file is missing, or the rows are in another order than the files.
    """
    if _read_list(folder / STATE, "_indices_data_files"):
        raise _unknown_state(folder / STATE, "rows chosen by an index file of their own")
    files = [folder / entry["filename"] for entry in _read_list(folder / STATE, "_data_files")]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise StepError(
            "a saved dataset lacks some of its files",
            where=str(folder),
            expected=f"the files that {STATE} lists",
            seen=f"no {', '.join(missing)}",
            remedy="copy the whole folder again",
        )
    return files


def read_saved(folder: Path, label: str, text: bool = True) -> Iterator[Batch]:
    """Yield the rows of a saved dataset; one without an id is named `label[row]`, as Python counts its rows."""
    row = 0
    for file in saved_files(folder):
        for batch in read_arrow(file, label, text, row):
            row += batch.num_rows
            yield batch


def _read_list(file: Path, key: str) -> list[Any]:
    try:
        return list(read_json(file).get(key) or [])
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise _unknown_state(file, f"{type(error).__name__}: {error}") from error


def _unknown_state(file: Path, seen: str) -> StepError:
    return StepError(
        "cannot tell which rows a saved dataset has",
        where=str(file),
        expected="what `save_to_disk` of the `datasets` library writes",
        seen=seen,
        remedy="load the dataset with that library, and save it again",
    )


def _rows_at_once(group: Any, ids: str) -> int:
    """Return how many rows of a Parquet row group to decode at once, by the number of its ids."""
    columns = (group.column(number) for number in range(group.num_columns))
    tokens = sum(c.num_values for c in columns if c.path_in_schema.partition(".")[0] == ids)
    return rows_per_batch(group.num_rows, tokens)


def _pieces(batch: Batch, places: Places) -> Iterator[Batch]:
    """Yield a batch in pieces of bounded size."""
    tokens = batch.column(places["input_ids"]).nbytes // 4
    size = rows_per_batch(batch.num_rows, tokens)
    for start in range(0, batch.num_rows, size):
        yield batch.slice(start, size)


def _open_stream(source: Any) -> Any:
    return pa.ipc.open_stream(source)


def _name(label: str, first: int, number: int) -> str:
    return f"{label}[{first + number}]"


@contextmanager
def _unharmed(file: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into a StepError that names it."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise StepError(
            f"cannot read {file.name}",
            where=str(file),
            expected="a whole file of the kind that its name says",
            seen=f"{type(error).__name__}: {error}",
            remedy="copy or write the file again",
        ) from error
