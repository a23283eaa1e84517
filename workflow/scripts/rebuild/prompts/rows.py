"""Reading the rows of a source one by one, each with its place; a row that cannot be read is still a row."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rebuild.errors import StepError
from rebuild.prompts.refusal import Refusal
from rebuild.prompts.sources import file_label, source_files

MAX_LINE_BYTES = 64 << 20  # keeps memory flat where a whole file is one line
EXCERPT_CHARS = 200
BATCH_ROWS = 256
STRUCTURED = ("messages", "conversations", "tools")

Raw = bytes | dict[str, Any] | Refusal


@dataclass(frozen=True)
class SourceRow:
    """A row and its place: `line` counts from 1; `raw` is a line of JSON, a decoded row, or why there is neither."""

    file: str
    line: int
    raw: Raw

    def columns(self) -> dict[str, Any]:
        """Return the row's columns.

        Raises:
            Refusal: the row cannot be read.
        """
        if isinstance(self.raw, Refusal):
            raise self.raw
        return parse_row(self.raw) if isinstance(self.raw, bytes) else self.raw

    def excerpt(self) -> str:
        """Return the beginning of the row, odd bytes shown as escapes."""
        if isinstance(self.raw, bytes):
            head = self.raw[: 4 * EXCERPT_CHARS].decode("utf-8", "backslashreplace")
            return head[:EXCERPT_CHARS].strip()
        return repr(self.raw)[:EXCERPT_CHARS] if isinstance(self.raw, dict) else ""


def read_rows(source: Path) -> Iterator[SourceRow]:
    """Yield the rows of all prompt files of `source`, in order; blank lines are no rows.

    Raises:
        StepError: a file as a whole cannot be read (cut short, not gzip, not Parquet).
    """
    for file in source_files(source):
        label = file_label(source, file)
        reader = _read_parquet if file.name.lower().endswith(".parquet") else _read_jsonl
        line = 0
        try:
            for line, raw in reader(file):
                yield SourceRow(label, line, raw)
        except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
            raise StepError(
                f"cannot read the prompts in {file}",
                where=f"after line {line}",
                expected="a whole file of the kind that its name says",
                seen=f"{type(error).__name__}: {error}",
                remedy="fetch or write the file again",
            ) from error


def parse_row(raw: bytes) -> dict[str, Any]:
    """Return the object that one line of JSON holds.

    Raises:
        Refusal: undecodable, lone_surrogate, malformed_json or not_an_object.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _why_unreadable(raw, str(error)) from None
    if not isinstance(value, dict):
        raise Refusal("not_an_object", f"JSON of type {type(value).__name__}")
    return value


def _why_unreadable(raw: bytes, error: str) -> Refusal:
    """Tell apart what one parser reports as the same error."""
    try:
        json.dumps(json.loads(raw.decode("utf-8")), ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as cause:
        return Refusal("undecodable", str(cause))
    except UnicodeEncodeError as cause:
        return Refusal("lone_surrogate", str(cause))
    except (ValueError, RecursionError):
        pass
    return Refusal("malformed_json", error)


def _read_jsonl(file: Path) -> Iterator[tuple[int, bytes | Refusal]]:
    zipped = file.name.lower().endswith(".gz")
    with gzip.open(file, "rb") if zipped else open(file, "rb") as handle:
        number = 0
        while raw := handle.readline(MAX_LINE_BYTES):
            number += 1
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                _skip_line(handle)
                yield number, Refusal("too_long", f"a line of over {MAX_LINE_BYTES} bytes")
                continue
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw and not raw.isspace():
                yield number, raw


def _skip_line(handle: BinaryIO | gzip.GzipFile) -> None:
    while piece := handle.readline(MAX_LINE_BYTES):
        if piece.endswith(b"\n"):
            return


def _read_parquet(file: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    number = 0
    # Read ahead, pyarrow's default, keeps all that it has read: the whole file, in the end.
    with pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
        for batch in table.iter_batches(batch_size=BATCH_ROWS):
            for row in _decode(batch):
                number += 1
                yield number, row


def _decode(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | Refusal]:
    """Yield the rows of a batch; where one does not decode, the others still do."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            for position in range(batch.num_rows):
                yield from _decode(batch.slice(position, 1))
        else:
            reason = "undecodable" if isinstance(error, UnicodeDecodeError) else "bad_content"
            yield Refusal(reason, str(error))
        return
    for row in rows:
        filled = {name: _without_nulls(row[name]) for name in STRUCTURED if name in row}
        yield row | filled


def _without_nulls(value: Any) -> Any:
    """Drop the keys without a value, which Parquet adds to every object that lacks a key another one has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
