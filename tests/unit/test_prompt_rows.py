"""The specification of reading: lines and files become rows, each with its place, none silently lost."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.errors import StepError
from rebuild.prompts import rows as prompt_rows
from rebuild.prompts.refusal import REASONS, Refusal
from rebuild.prompts.rows import parse_row, read_rows
from rebuild.prompts.rows_to_prompts import to_prompt

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"

# Lines


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "Hi"', "malformed_json"),
        (b"\x00\x00\x00", "malformed_json"),
        (b'{"prompt": "Hi", "score": NaN}', "malformed_json"),
        (b"[" * 100_000, "malformed_json"),
        (b'{"prompt": "caf\xe9"}', "undecodable"),
        (b'{"prompt": "\xed\xa0\x80"}', "undecodable"),
        (b'{"prompt": "\\ud800"}', "lone_surrogate"),
        (b'{"prompt": "Hi", "\\udc00": 1}', "lone_surrogate"),
        (b'["Hi"]', "not_an_object"),
        (b"null", "not_an_object"),
        (b'"Hi"', "not_an_object"),
    ],
    ids=repr,
)
def test_a_line_that_is_no_object_is_refused(line, reason):
    with pytest.raises(Refusal) as caught:
        parse_row(line)
    assert caught.value.reason == reason


def test_a_whole_surrogate_pair_is_an_ordinary_character():
    assert parse_row(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "😀"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_an_object_or_is_refused_with_a_known_reason(line):
    try:
        assert isinstance(parse_row(line), dict)
    except Refusal as refusal:
        assert refusal.reason in REASONS


# Files


def write_parquet(file: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    pq.write_table(pa.Table.from_pylist(rows, **options), file)


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "One"}\r\n\n  \t\n{"prompt": "Two"}')
    assert [(row.line, row.columns()) for row in read_rows(file)] == [
        (1, {"prompt": "One"}),
        (4, {"prompt": "Two"}),
    ]


def test_gzip_and_parquet_give_the_rows_that_jsonl_gives(tmp_path):
    rows = [{"prompt": "One"}, {"prompt": "שתיים 👋"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "p.jsonl").write_bytes(lines)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(lines))
    write_parquet(tmp_path / "p.parquet", rows)
    for name in ("p.jsonl", "p.jsonl.gz", "p.parquet"):
        assert [row.columns() for row in read_rows(tmp_path / name)] == rows
        assert [(row.file, row.line) for row in read_rows(tmp_path / name)] == [
            (name, 1),
            (name, 2),
        ]


def test_a_directory_is_read_through_in_the_order_of_its_relative_paths(tmp_path):
    for name in ("b.jsonl", "a/z.jsonl", "a.JSONL", "a/.hidden.jsonl", ".git/x.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"prompt": name}) + "\n")
    assert [row.file for row in read_rows(tmp_path)] == ["a.JSONL", "a/z.jsonl", "b.jsonl"]


def test_keys_that_parquet_fills_with_null_are_not_part_of_a_tool(tmp_path):
    tools = [
        [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "string"}}}}],
        [{"type": "function", "function": {"name": "g", "parameters": {"y": {"type": "number"}}}}],
    ]
    write_parquet(tmp_path / "p.parquet", [{"prompt": "Hi", "tools": some} for some in tools])
    read = [to_prompt(row.columns(), "") for row in read_rows(tmp_path / "p.parquet")]
    assert [json.loads(prompt["tools"]) for prompt in read] == tools


def test_one_parquet_value_that_is_not_utf8_spoils_its_own_row_only(tmp_path):
    texts = pa.array([b"One", b"caf\xe9", b"Three"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    pq.write_table(pa.table({"prompt": column}), tmp_path / "p.parquet")
    first, second, third = read_rows(tmp_path / "p.parquet")
    assert (first.columns(), third.columns()) == ({"prompt": "One"}, {"prompt": "Three"})
    with pytest.raises(Refusal) as caught:
        second.columns()
    assert (caught.value.reason, second.line, second.excerpt()) == ("undecodable", 2, "")


def test_parquet_values_that_json_has_no_word_for_are_kept_as_text(tmp_path):
    table = pa.table({"prompt": ["Hi"], "raw": [b"\xff"], "day": pa.array([0], pa.date32())})
    pq.write_table(table, tmp_path / "p.parquet")
    (row,) = read_rows(tmp_path / "p.parquet")
    assert json.loads(to_prompt(row.columns(), "")["extra"]) == {
        "raw": "b'\\xff'",
        "day": "1970-01-01",
    }


def test_a_line_beyond_all_measure_is_refused_unread_and_the_next_one_is_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(prompt_rows, "MAX_LINE_BYTES", 64)
    lines = [{"prompt": "x" * 200}, {"prompt": "Two"}, {"prompt": "y" * 64}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first, second, third = read_rows(tmp_path / "p.jsonl")
    assert second.columns() == {"prompt": "Two"}
    assert (first.line, second.line, third.line) == (1, 2, 3)
    for row in (first, third):
        with pytest.raises(Refusal, match="too_long"):
            row.columns()


def test_the_excerpt_of_a_row_is_short_and_shows_odd_bytes_as_escapes(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"caf\xe9 " + "😀".encode() * 500)
    (row,) = read_rows(tmp_path / "p.jsonl")
    assert row.excerpt() == "caf\\xe9 " + "😀" * 192


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.parquet"])
def test_a_file_that_is_cut_short_stops_the_step(tmp_path, name):
    rows = [{"prompt": f"{number}"} for number in range(1000)]
    write_parquet(tmp_path / "p.parquet", rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(lines))
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StepError, match="cannot read the prompts"):
        list(read_rows(tmp_path / name))


def test_a_parquet_file_is_never_in_memory_as_a_whole(tmp_path):
    noise = random.Random(0)
    column = pa.array([noise.randbytes(500).hex() for _ in range(100_000)])
    pq.write_table(pa.table({"prompt": column}), tmp_path / "p.parquet", use_dictionary=False)
    size = (tmp_path / "p.parquet").stat().st_size
    # VmHWM, not ru_maxrss, which starts at the size of the process that forked this one
    code = """
import re, sys
from pathlib import Path
from rebuild.prompts.rows import read_rows
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
print(sum(1 for row in read_rows(Path(sys.argv[1]))), peak() - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "p.parquet")]
    done = subprocess.run(command, cwd=SCRIPTS, check=True, capture_output=True, text=True)
    rows, grown = map(int, done.stdout.split())
    assert rows == 100_000
    assert grown < size / 2
