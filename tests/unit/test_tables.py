"""The Parquet files of a run: columns, metadata, and that only whole files appear."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rebuild.errors import StepError
from rebuild.tables import (
    GENERATED,
    HIDDEN_STATES,
    PROMPTS,
    REJECTED,
    TOKENIZED,
    TableWriter,
    iter_rows,
    open_parquet,
    read_metadata,
)

MESSAGES = (
    "list<struct<role, content, reasoning_content, tool_calls, tool_call_id, name>> of strings"
)
DESIGN = {  # columns as the design lists them; a type is said where it is not plain text
    "prompts": f"prompt_id, source, messages {MESSAGES}, tools, extra",
    "generated": f"sample_id, prompt_id, turn int32, source, messages {MESSAGES}, tools, "
    "prompt_token_ids list<int32>, response_token_ids list<int32>, reasoning, content, tool_calls, "
    "finish_reason, status, error, prompt_tokens int32, completion_tokens int32, "
    "reasoning_tokens int32, latency_s double, attempt int32, response_logprobs list<float>",
    "tokenized": "sample_id, prompt_id, turn int32, source, input_ids list<int32>, "
    "loss_mask list<int8>, seq_len int32, loss_tokens int32, mask_origin, finish_reason",
    "hidden_states": "sample_id, file, key, seq_len int32, layers list<int32>, dtype, bytes int64, "
    "sha256, rms list<float>, finite bool, zero_rows int32, format, token_rms list<float>, "
    "final_rms float, logprob float",
    "rejected": "file, line int64, prompt_id, reason, detail",
}
SCHEMAS = {
    "prompts": PROMPTS,
    "generated": GENERATED,
    "tokenized": TOKENIZED,
    "hidden_states": HIDDEN_STATES,
    "rejected": REJECTED,
}
ROW = {
    "sample_id": "a_gen0",
    "prompt_id": "a",
    "turn": 0,
    "source": "a.jsonl",
    "input_ids": [1, 2, 3],
    "loss_mask": [0, 1, 1],
    "seq_len": 3,
    "loss_tokens": 2,
    "mask_origin": "engine",
    "finish_reason": "stop",
}


def described(field: pa.Field) -> str:
    if pa.types.is_string(field.type):
        return field.name
    if field.name == "messages":
        parts = list(field.type.value_type)
        assert all(pa.types.is_string(part.type) for part in parts)
        names = ", ".join(part.name for part in parts)
        return f"messages list<struct<{names}>> of strings"
    kind = str(field.type)
    return f"{field.name} {kind.replace('element: ', '').replace('item: ', '')}"


def rows(count: int) -> list[dict[str, Any]]:
    return [ROW | {"sample_id": f"{number}_gen0", "turn": number} for number in range(count)]


def names(folder: Path) -> list[str]:
    """Return the names of all files in the folder, hidden ones too."""
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("name", DESIGN)
def test_columns_are_those_of_the_design(name: str):
    assert ", ".join(map(described, SCHEMAS[name])) == DESIGN[name]


def test_rows_come_back_in_order_from_row_groups_of_the_asked_size(tmp_path: Path):
    path = tmp_path / "00000.parquet"
    with TableWriter(path, TOKENIZED, {}, row_group=10) as writer:
        for start in range(0, 45, 15):
            writer.write(rows(45)[start : start + 15])
    assert list(iter_rows(path, batch_size=7)) == rows(45)
    file = pq.ParquetFile(path).metadata
    assert [file.row_group(i).num_rows for i in range(file.num_row_groups)] == [10, 10, 10, 10, 5]
    assert file.row_group(0).column(4).compression == "ZSTD"
    assert pq.read_schema(path).remove_metadata() == TOKENIZED


def test_only_the_asked_columns_are_read(tmp_path: Path):
    path = tmp_path / "00000.parquet"
    with TableWriter(path, TOKENIZED, {}) as writer:
        writer.write(rows(1))
    assert list(iter_rows(path, columns=["seq_len"])) == [{"seq_len": 3}]


def test_metadata_holds_version_rows_and_what_the_writer_adds_until_the_end(tmp_path: Path):
    path = tmp_path / "00000.parquet"
    with TableWriter(path, TOKENIZED, {"fingerprint": "abc"}) as writer:
        writer.write(rows(3))
        writer.metadata["content"] = "ü"
    facts = {"schema_version": "1", "rows": "3", "fingerprint": "abc", "content": "ü"}
    assert read_metadata(path) == facts


def test_an_empty_table_is_a_whole_file(tmp_path: Path):
    path = tmp_path / "00000.parquet"
    with TableWriter(path, GENERATED, {}):
        pass
    assert list(iter_rows(path)) == []
    assert read_metadata(path)["rows"] == "0"
    assert pq.read_schema(path).names == GENERATED.names


def test_nothing_is_null_but_what_was_given_as_null(tmp_path: Path):
    path = tmp_path / "00000.parquet"
    row = {"file": None, "key": "", "layers": [], "rms": None, "bytes": 1 << 40}
    row |= {"sample_id": "a", "seq_len": 0, "dtype": "bfloat16", "sha256": "0" * 64}
    row |= {"finite": False, "zero_rows": 0, "format": "specforge"}
    row |= {"token_rms": None, "final_rms": None, "logprob": None}
    with TableWriter(path, HIDDEN_STATES, {}) as writer:
        writer.write([row])
    assert list(iter_rows(path)) == [row]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"turns": 1}, "'turns'"), ({"turn": ...}, "'turn'")],
    ids=["a column too many", "a column too few"],
)
def test_a_row_with_other_columns_is_refused(tmp_path: Path, change: dict[str, Any], named: str):
    row = {key: value for key, value in (ROW | change).items() if value is not ...}
    with (
        pytest.raises(ValueError, match=named),
        TableWriter(tmp_path / "a.parquet", TOKENIZED, {}) as writer,
    ):
        writer.write([row])
    assert names(tmp_path) == []


@pytest.mark.parametrize("value", [1 << 31, "one", [1]], ids=["too large", "text", "a list"])
@pytest.mark.parametrize("row_group", [1, 100], ids=["at once", "at the end"])
def test_a_value_that_does_not_fit_its_column_leaves_nothing(
    tmp_path: Path, value: Any, row_group: int
):
    with (
        pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError, OverflowError)),
        TableWriter(tmp_path / "a.parquet", TOKENIZED, {}, row_group) as writer,
    ):
        writer.write(rows(1))
        writer.write([ROW | {"seq_len": value}])
    assert names(tmp_path) == []


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "00000.parquet"
    path.write_text("old")
    with pytest.raises(KeyError), TableWriter(path, TOKENIZED, {}, row_group=1) as writer:
        writer.write(rows(5))
        raise KeyError("shard")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["00000.parquet"]


def test_a_full_disk_leaves_nothing(tmp_path: Path):
    """The limit on file sizes stands for the disk."""
    code = (
        "import pathlib, sys; from rebuild.tables import *; "
        "writer = TableWriter(pathlib.Path(sys.argv[1]), TOKENIZED, {}, row_group=1); "
        f"row = {ROW!r}\n"
        "with writer: [writer.write([row | {'source': str(number) * 1000}]) for number in range(9000)]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.parquet")],
        env=os.environ | {"PYTHONPATH": "workflow/scripts"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert names(tmp_path) == []


def test_answers_of_a_hundred_thousand_tokens_and_their_logprobs_survive(tmp_path: Path):
    path = tmp_path / "00000.parquet"
    row: dict[str, Any] = dict.fromkeys(GENERATED.names)
    row |= {"response_token_ids": list(range(100_000)), "response_logprobs": [-0.5] * 100_000}
    row |= {"content": "漢字" * 200_000, "messages": [dict.fromkeys(["role", "name"], "user")]}
    with TableWriter(path, GENERATED, {}) as writer:
        writer.write([row] * 3)
    back = list(iter_rows(path))
    assert len(back) == 3
    assert back[2]["response_token_ids"] == row["response_token_ids"]
    assert back[2]["response_logprobs"] == row["response_logprobs"]
    assert back[2]["content"] == row["content"]
    assert back[2]["messages"][0]["role"] == "user"
    assert back[2]["messages"][0]["content"] is None


def test_reading_holds_a_few_row_groups_in_memory_whatever_the_size_of_the_file(tmp_path: Path):
    path = tmp_path / "big.parquet"
    schema = pa.schema([("noise", pa.binary())])
    with TableWriter(path, schema, {}, row_group=16) as writer:
        writer.write([{"noise": os.urandom(1 << 14)} for _ in range(2048)])
    before, most = pa.total_allocated_bytes(), 0
    for _ in open_parquet(path).iter_batches(batch_size=16):
        most = max(most, pa.total_allocated_bytes() - before)
    assert path.stat().st_size > 30e6
    assert most < 5e6


@pytest.mark.parametrize("kept", [0, 4, 200, -1], ids=["empty", "magic only", "half", "last byte"])
def test_a_file_that_is_cut_short_is_named_with_what_to_do(tmp_path: Path, kept: int):
    path = tmp_path / "results" / "00000.parquet"
    path.parent.mkdir()
    with TableWriter(path, TOKENIZED, {}) as writer:
        writer.write(rows(100))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StepError) as error:
        open_parquet(path)
    assert str(path) in error.value.what
    assert f"rm {path}" in error.value.remedy


def test_nobody_is_told_to_remove_a_file_that_this_workflow_cannot_make_again(tmp_path: Path):
    (tmp_path / "mine.parquet").write_bytes(b"PAR1")
    with pytest.raises(StepError) as error:
        open_parquet(tmp_path / "mine.parquet")
    assert "rm " not in error.value.remedy


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(StepError, match=r"nowhere\.parquet"):
        read_metadata(tmp_path / "nowhere.parquet")
