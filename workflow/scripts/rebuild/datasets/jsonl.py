"""Tokenized datasets in lines of JSON: what speculators writes, and what SpecForge takes online."""

import gzip
import json
import shlex
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from rebuild.datasets.columns import BATCH_ROWS, Batch, from_rows, locate_columns
from rebuild.errors import StepError

BLOCK_BYTES = 8 << 20  # of JSON, which is ten times that as Python objects
ROWS_TRIED = 20
SHOWN = 60  # characters

Row = dict[str, Any]


def jsonl_names(file: Path) -> list[str]:
    """Return the places of the values in a file's first rows, of which some may be broken."""
    first = islice(_numbered_rows(file), ROWS_TRIED)
    return list(dict.fromkeys(name for _, _, row in first for name in row_names(row)))


def read_jsonl(file: Path, label: str, text: bool = True) -> Iterator[Batch]:
    """Yield the rows of a file; one without an id is named `label:line`. Blank lines are passed over.

    The columns are all that the rows of the first block have.

    Raises:
        StepError: a line is no JSON object, the file is cut short, or lacks ids or mask.
    """
    places = None
    for lines, rows in _blocks(file):
        if places is None:
            places = locate_columns({name for row in rows for name in row_names(row)}, file, text)
        yield from_rows(rows, places, partial(_name, label, lines))


def row_names(row: Row) -> list[str]:
    """Return the keys of a row, and those of the objects in it as `key.inner`."""
    objects = {key: value for key, value in row.items() if isinstance(value, dict)}
    return [*row, *(f"{key}.{inner}" for key, value in objects.items() for inner in value)]


def _name(label: str, lines: list[int], number: int) -> str:
    return f"{label}:{lines[number]}"


def _blocks(file: Path) -> Iterator[tuple[list[int], list[Row]]]:
    """Yield line numbers and their rows, a bounded amount at a time."""
    lines: list[int] = []
    rows: list[Row] = []
    total = 0
    for line, size, row in _numbered_rows(file):
        lines.append(line)
        rows.append(row)
        total += size
        if len(rows) == BATCH_ROWS or total >= BLOCK_BYTES:
            yield lines, rows
            lines, rows, total = [], [], 0
    if rows:
        yield lines, rows


def _numbered_rows(file: Path) -> Iterator[tuple[int, int, Row]]:
    """Yield number (from 1), size in bytes and content of every line that is not blank."""
    line = 0
    try:
        with gzip.open(file, "rb") if file.suffix.lower() == ".gz" else open(file, "rb") as handle:
            for line, raw in enumerate(handle, start=1):
                if not raw.isspace():
                    yield line, len(raw), _parse(raw, file, line)
    except (OSError, EOFError, zlib.error) as error:
        raise StepError(
            f"cannot read {file.name}",
            where=f"{file}, after line {line}",
            expected="a whole file, compressed if its name ends in .gz",
            seen=f"{type(error).__name__}: {error}",
            remedy="copy or write the file again",
        ) from error


def _parse(raw: bytes, file: Path, line: int) -> Row:
    """Return the row that a line holds; Python's own parser takes what orjson refuses, such as NaN."""
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            row = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise _broken_line(file, line, str(error), raw) from error
    if not isinstance(row, dict):
        raise _broken_line(file, line, f"JSON of type {type(row).__name__}", raw)
    return row


def _broken_line(file: Path, line: int, seen: str, raw: bytes) -> StepError:
    shown = shlex.quote(str(file))
    reader = f"zcat {shown} | sed -n" if file.suffix.lower() == ".gz" else "sed -n"
    command = f"{reader} {line}p" + ("" if file.suffix.lower() == ".gz" else f" {shown}")
    end = raw[-SHOWN:].decode("utf-8", "replace").rstrip("\n")
    return StepError(
        "a line of the dataset cannot be read",
        where=f"{file}, line {line} of {len(raw)} bytes",
        expected="one JSON object a line, whole",
        seen=f"{seen}; it ends in {end!r}",
        remedy=f"look at it (`{command} | cut -c 1-300`), then write it again or remove it",
    )
