"""The Parquet files of a run: their columns, and writing and reading them in a stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rebuild.errors import StepError
from rebuild.files import atomic_path

SCHEMA_VERSION = "1"
ROW_GROUP = 1024

MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.string()),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
    ]
)
IDS = pa.list_(pa.int32())

PROMPTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("tools", pa.string()),
        ("extra", pa.string()),
    ]
)
REJECTED = pa.schema(
    [
        ("file", pa.string()),
        ("line", pa.int64()),
        ("prompt_id", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)
GENERATED = pa.schema(
    [
        ("sample_id", pa.string()),
        ("prompt_id", pa.string()),
        ("turn", pa.int32()),
        ("source", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("tools", pa.string()),
        ("prompt_token_ids", IDS),
        ("response_token_ids", IDS),
        ("reasoning", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.string()),
        ("finish_reason", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("reasoning_tokens", pa.int32()),
        ("latency_s", pa.float64()),
        ("attempt", pa.int32()),
        ("response_logprobs", pa.list_(pa.float32())),
    ]
)
TOKENIZED = pa.schema(
    [
        ("sample_id", pa.string()),
        ("prompt_id", pa.string()),
        ("turn", pa.int32()),
        ("source", pa.string()),
        ("input_ids", IDS),
        ("loss_mask", pa.list_(pa.int8())),
        ("seq_len", pa.int32()),
        ("loss_tokens", pa.int32()),
        ("mask_origin", pa.string()),
        ("finish_reason", pa.string()),
    ]
)
HIDDEN_STATES = pa.schema(
    [
        ("sample_id", pa.string()),
        ("file", pa.string()),
        ("key", pa.string()),
        ("seq_len", pa.int32()),
        ("layers", IDS),
        ("dtype", pa.string()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("rms", pa.list_(pa.float32())),
        ("finite", pa.bool_()),
        ("zero_rows", pa.int32()),
        ("format", pa.string()),
        ("token_rms", pa.list_(pa.float32())),
        ("final_rms", pa.float32()),
        ("logprob", pa.float32()),
    ]
)


class TableWriter:
    """Streams rows into one zstd Parquet file, written beside `path` and renamed on a clean exit."""

    def __init__(
        self, path: Path, schema: pa.Schema, metadata: dict[str, str], row_group: int = ROW_GROUP
    ) -> None:
        self.path = path
        self.schema = schema
        self.metadata = metadata
        self.row_group = row_group
        self.rows = 0
        self.pending: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self.context = self._open()
        return self.context.__enter__()

    @contextmanager
    def _open(self) -> Iterator[Self]:
        with (
            atomic_path(self.path) as temporary,
            pq.ParquetWriter(
                temporary, self.schema, compression="zstd", use_dictionary=False
            ) as self.writer,
        ):
            yield self
            self._flush(len(self.pending))
            facts = {"schema_version": SCHEMA_VERSION, "rows": str(self.rows), **self.metadata}
            self.writer.add_key_value_metadata(facts)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Add rows; every `row_group` of them go to the file.

        Raises:
            ValueError: a row has other columns than the schema (pyarrow would drop or blank them without a word).
        """
        for row in rows:
            if row.keys() != set(self.schema.names):
                wrong = sorted(row.keys() ^ set(self.schema.names))
                raise ValueError(f"{self.path}: row with other columns than the schema: {wrong}")
        self.pending.extend(rows)
        self._flush(len(self.pending) - len(self.pending) % self.row_group)

    def write_table(self, table: pa.Table) -> None:
        """Add a table with the schema's own columns as a row group (or several), after all rows so far."""
        self._flush(len(self.pending))
        self.writer.write_table(table.select(self.schema.names), row_group_size=self.row_group)
        self.rows += len(table)

    def _flush(self, count: int) -> None:
        for start in range(0, count, self.row_group):
            chunk = self.pending[start : min(start + self.row_group, count)]
            self.writer.write_table(pa.Table.from_pylist(chunk, schema=self.schema))
        del self.pending[:count]
        self.rows += count

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.context.__exit__(kind, error, trace)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the file's own metadata (`schema_version`, `rows`, `fingerprint`, …)."""
    raw = open_parquet(path).metadata.metadata or {}
    return {k.decode(): v.decode() for k, v in raw.items() if k != b"ARROW:schema"}


def iter_rows(
    path: Path, columns: list[str] | None = None, batch_size: int = 256
) -> Iterator[dict[str, Any]]:
    """Yield the rows as dictionaries, `batch_size` of them in memory at a time."""
    for batch in open_parquet(path).iter_batches(batch_size=batch_size, columns=columns):
        yield from batch.to_pylist()


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises:
        StepError: the file is missing, cut short or not Parquet.
    """
    try:
        # Buffered ahead, every byte that was read stays in memory until the file is closed.
        return pq.ParquetFile(path, pre_buffer=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise StepError(
            f"cannot read the Parquet file {path}",
            expected="a whole Parquet file written by an earlier phase",
            seen=str(error),
            remedy=f"remove it, then run `snakemake --rerun-incomplete` to have it made again: rm {path}"
            if "results" in path.parts
            else "take the file from where it comes from once more",
        ) from error
