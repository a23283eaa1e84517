"""The specification of sharding: every row accounted for, the same shards on any machine, memory flat."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shard_prompts as step
from rebuild.errors import StepError
from rebuild.files import read_json, sha256_file
from rebuild.prompts.refusal import REASONS
from rebuild.prompts.rows import SourceRow, read_rows
from rebuild.prompts.rows_to_prompts import content_hash
from rebuild.tables import PROMPTS, REJECTED, iter_rows, read_metadata

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"
HELLO = {"prompt": "Hello"}


def names(count: int) -> list[str]:
    return [f"{number:05d}" for number in range(count)]


def write_lines(file: Path, rows: Iterable[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def shard(source: Path, out_dir: Path, shards: int = 1, **settings: Any) -> dict[str, Any]:
    """Run the step, without a canary unless it is given, and return its manifest."""
    defaults = {"assign": "interleave", "max_rejected": 1.0, "limit": None, "fingerprint": "f1"}
    step.shard_prompts(source, out_dir, names(shards), **({"canary": 0} | defaults | settings))
    return read_json(out_dir / "manifest.json")


def texts(file: Path) -> list[str]:
    return [row["messages"][0]["content"] for row in iter_rows(file)]


def rejected(out_dir: Path) -> list[tuple[int, str]]:
    return [(row["line"], row["reason"]) for row in iter_rows(out_dir / "rejected.parquet")]


def numbered(count: int) -> list[dict[str, str]]:
    return [{"prompt": str(number)} for number in range(count)]


# Files


def test_shards_and_rejected_rows_have_the_columns_of_their_tables(tmp_path):
    shard(write_lines(tmp_path / "p.jsonl", [HELLO, 3]), tmp_path / "out")
    assert pq.read_schema(tmp_path / "out/00000.parquet").equals(PROMPTS)
    assert pq.read_schema(tmp_path / "out/rejected.parquet").equals(REJECTED)


def test_the_manifest_counts_and_identifies_everything(tmp_path):
    rows = [{"turns": ["One", "Two"]}, HELLO, 3, {"prompt": ""}, {"prompt": "Bye"}]
    source = write_lines(tmp_path / "p.jsonl", rows)
    manifest = shard(source, tmp_path / "out", shards=2)
    assert {key: manifest[key] for key in manifest if key not in ("sources", "shards")} == {
        "schema_version": "1",
        "fingerprint": "f1",
        "rows": 5,
        "accepted": 3,
        "rejected": 2,
        "rejected_reasons": {"empty": 1, "not_an_object": 1},
        "assign": "interleave",
        "canary": None,
    }
    (entry,) = manifest["sources"]
    assert (entry["path"], entry["sha256"]) == ("p.jsonl", sha256_file(source))
    counts = {name: (s["prompts"], s["user_turns"]) for name, s in manifest["shards"].items()}
    assert counts == {"00000": (2, 3), "00001": (1, 1)}


def test_a_shard_s_hash_in_manifest_and_file_is_that_of_its_rows(tmp_path):
    manifest = shard(write_lines(tmp_path / "p.jsonl", numbered(5)), tmp_path / "out", shards=2)
    for name in names(2):
        file = tmp_path / f"out/{name}.parquet"
        metadata = read_metadata(file)
        hashed = content_hash(iter_rows(file))
        assert metadata["content_sha256"] == manifest["shards"][name]["content_sha256"] == hashed
        assert metadata["fingerprint"] == "f1"
        assert metadata["rows"] == str(manifest["shards"][name]["prompts"])


def test_nothing_but_the_outputs_is_left(tmp_path):
    shard(write_lines(tmp_path / "p.jsonl", numbered(3)), tmp_path / "out", shards=2)
    left = {file.name for file in (tmp_path / "out").iterdir()}
    assert left == {"00000.parquet", "00001.parquet", "rejected.parquet", "manifest.json"}


# Assignment


def test_interleave_deals_the_accepted_prompts_out_in_order(tmp_path):
    rows = [*numbered(3), "no prompt", {"prompt": "3"}, {"prompt": "4"}]
    shard(write_lines(tmp_path / "p.jsonl", rows), tmp_path / "out", shards=2)
    assert texts(tmp_path / "out/00000.parquet") == ["0", "2", "4"]
    assert texts(tmp_path / "out/00001.parquet") == ["1", "3"]


def test_contiguous_keeps_runs_together_and_leaves_no_shard_empty(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", numbered(10))
    shard(source, tmp_path / "out", shards=4, assign="contiguous")
    shards = [texts(tmp_path / f"out/{name}.parquet") for name in names(4)]
    assert shards == [["0", "1"], ["2", "3", "4"], ["5", "6"], ["7", "8", "9"]]


def test_a_limit_ends_the_reading_after_that_many_accepted_prompts(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", ["no prompt", *numbered(10)])
    manifest = shard(source, tmp_path / "out", limit=4)
    assert (manifest["rows"], manifest["accepted"], manifest["rejected"]) == (5, 4, 1)
    assert texts(tmp_path / "out/00000.parquet") == ["0", "1", "2", "3"]


def test_an_unknown_assignment_stops_the_step(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", numbered(2))
    with pytest.raises(StepError, match="interleave or contiguous"):
        shard(source, tmp_path / "out", assign="random")


def test_the_same_input_gives_the_same_bytes_wherever_it_lies(tmp_path):
    rows = [*numbered(50), "no prompt", {"prompt": "שלום 👋", "note": {"b": 1, "a": 2}}]
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        source = write_lines(tmp_path / place / "p.jsonl", rows)
        shard(source, tmp_path / place / "out", shards=3)
    for name in [*names(3), "rejected"]:
        here, there = (tmp_path / place / f"out/{name}.parquet" for place in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()


def test_all_kinds_of_files_in_a_directory_make_one_set_of_prompts(tmp_path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{"prompt": "c"}]), source / "deep/c.parquet")
    (source / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "b"}\n{"prompt": "a"}\n'))
    write_lines(source / "a.jsonl", [{"prompt": "a"}])
    manifest = shard(source, tmp_path / "out")
    assert texts(tmp_path / "out/00000.parquet") == ["a", "b", "c"]
    (duplicate,) = iter_rows(tmp_path / "out/rejected.parquet")
    assert (duplicate["file"], duplicate["line"]) == ("b.jsonl.gz", 2)
    assert [entry["path"] for entry in manifest["sources"]] == [
        "a.jsonl",
        "b.jsonl.gz",
        "deep/c.parquet",
    ]
    assert [row["source"] for row in iter_rows(tmp_path / "out/00000.parquet")] == [
        "a.jsonl",
        "b.jsonl.gz",
        "deep/c.parquet",
    ]


def test_unicode_comes_through_as_it_was(tmp_path):
    text = "e\u0301 é 👩‍🚀 مرحبا שלום 你好 \u0000 \u2028 <|im_end|> </think>"
    shard(write_lines(tmp_path / "p.jsonl", [{"id": text[:9], "prompt": text}]), tmp_path / "out")
    (row,) = iter_rows(tmp_path / "out/00000.parquet")
    assert (row["prompt_id"], row["messages"][0]["content"]) == (text[:9], text)


# The canary


def mixed(count: int) -> list[dict[str, Any]]:
    """Return prompts of three sources, of one to three turns, short and long."""
    return [
        {
            "id": f"{number}",
            "source": ("talk", "code", "rare")[2 if number % 20 == 7 else number % 2],
            "turns": [f"{number} {turn} " + "word " * (number * 7 % 90) for turn in range(turns)],
        }
        for number in range(count)
        for turns in [1 + number % 3]
    ]


def ids(file: Path) -> list[str]:
    return [row["prompt_id"] for row in iter_rows(file)]


@pytest.mark.parametrize("assign", ["interleave", "contiguous"])
def test_every_prompt_is_in_the_canary_or_in_one_other_shard(tmp_path, assign):
    source = write_lines(tmp_path / "p.jsonl", mixed(60))
    manifest = shard(source, tmp_path / "out", shards=4, canary=8, assign=assign)
    files = {name: ids(tmp_path / f"out/{name}.parquet") for name in ["canary", *names(4)]}
    assert sorted(int(name) for rows in files.values() for name in rows) == list(range(60))
    assert {name: len(rows) for name, rows in files.items()} == {
        "canary": 8,
        **dict.fromkeys(names(4), 13),
    }
    assert list(manifest["shards"]) == list(files)
    assert all(rows == sorted(rows, key=int) for rows in files.values())


def test_the_other_prompts_are_dealt_out_as_if_the_canary_had_never_been(tmp_path):
    rows = mixed(30)
    shard(write_lines(tmp_path / "p.jsonl", rows), tmp_path / "out", shards=3, canary=5)
    gone = set(ids(tmp_path / "out/canary.parquet"))
    left = [row for row in rows if row["id"] not in gone]
    shard(write_lines(tmp_path / "left.jsonl", left), tmp_path / "without", shards=3)
    for name in names(3):
        here, there = (tmp_path / place / f"{name}.parquet" for place in ("out", "without"))
        assert here.read_bytes() == there.read_bytes()


def test_the_canary_is_the_same_wherever_it_is_chosen(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", mixed(50))
    for place in ("here", "there"):
        shard(source, tmp_path / place, shards=2, canary=7)
    here, there = (tmp_path / place / "canary.parquet" for place in ("here", "there"))
    assert here.read_bytes() == there.read_bytes()
    assert content_hash(iter_rows(here)) == read_metadata(here)["content_sha256"]


def test_the_canary_has_every_source_and_number_of_turns_and_short_and_long_prompts(tmp_path):
    shard(write_lines(tmp_path / "p.jsonl", mixed(200)), tmp_path / "out", canary=20)
    rows = list(iter_rows(tmp_path / "out/canary.parquet"))
    assert {row["source"] for row in rows} == {"talk", "code", "rare"}
    assert {len(row["messages"]) for row in rows} == {1, 2, 3}
    words = [len(row["messages"][0]["content"].split()) for row in rows]
    assert min(words) < 20 and max(words) > 70


def test_the_manifest_says_what_the_canary_is_and_how_it_was_chosen(tmp_path):
    manifest = shard(write_lines(tmp_path / "p.jsonl", mixed(40)), tmp_path / "out", canary=4)
    assert manifest["canary"]["prompts"] == manifest["shards"]["canary"]["prompts"] == 4
    assert "in proportion" in manifest["canary"]["chosen"]
    assert manifest["canary"]["sources"] == {
        "code": {"prompts": 1, "of": 18},
        "rare": {"prompts": 1, "of": 2},
        "talk": {"prompts": 2, "of": 20},
    }


def test_the_canary_is_chosen_from_the_prompts_within_the_limit(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", mixed(50))
    shard(source, tmp_path / "out", canary=5, limit=10)
    chosen = ids(tmp_path / "out/canary.parquet")
    assert len(chosen) == 5 and max(map(int, chosen)) < 10


# Accounting


def test_every_reason_is_reported_with_line_id_and_excerpt(tmp_path):
    lines = [
        b'{"id": "first", "prompt": "Hello"}',
        b'{"prompt": ',
        b'{"prompt": "caf\xe9"}',
        b'{"prompt": "\\ud800"}',
        b"[1]",
        b'{"id": "a", "text": "Hi"}',
        b'{"id": "b", "prompt": " "}',
        b'{"id": "c", "messages": [{"role": "system", "content": "Hi"}]}',
        b'{"id": "d", "messages": [{"role": "robot", "content": "Hi"}]}',
        b'{"id": "e", "messages": [{"role": "user", "content": "Hi"},'
        b' {"role": "system", "content": "Hi"}]}',
        b'{"id": "f", "prompt": 3}',
        b'{"id": "g", "prompt": "Hi", "tools": "clock"}',
        b'{"id": "\\n", "prompt": "Hi"}',
        b'{"id": "h", "prompt": "' + b"x" * 2000 + b'"}',
        b'{"id": "i", "prompt": "Hello"}',
        b'{"id": "first", "prompt": "Hello again"}',
    ]
    (tmp_path / "p.jsonl").write_bytes(b"\n".join(lines))
    manifest = shard(tmp_path / "p.jsonl", tmp_path / "out", max_chars=1000)
    rows = list(iter_rows(tmp_path / "out/rejected.parquet"))
    assert [row["reason"] for row in rows] == list(REASONS)
    assert [row["line"] for row in rows] == list(range(2, 17))
    assert [row["prompt_id"] for row in rows] == [*[None] * 4, *"abcdefg", None, "h", "i", "first"]
    assert manifest["rejected_reasons"] == dict.fromkeys(sorted(REASONS), 1)
    assert all(len(row["detail"].split(" | ", 1)[1]) <= 200 for row in rows)
    assert '{"prompt": "caf\\xe9"}' in rows[1]["detail"]


def test_a_row_repeated_word_for_word_is_a_duplicate_conversation(tmp_path):
    rows = [{"id": 1, "prompt": "Hi"}, {"id": 1, "prompt": "Hi"}, {"id": "1", "prompt": "Ho"}]
    shard(write_lines(tmp_path / "p.jsonl", rows), tmp_path / "out")
    assert rejected(tmp_path / "out") == [(2, "duplicate_conversation"), (3, "duplicate_id")]


def test_prompts_that_differ_only_in_dropped_answers_are_duplicates(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]}
        for answer in ("Hello", "Good day")
    ]
    shard(write_lines(tmp_path / "p.jsonl", rows), tmp_path / "out")
    assert rejected(tmp_path / "out") == [(2, "duplicate_conversation")]


def test_a_refused_row_takes_no_id_away(tmp_path):
    rows = [{"id": "a", "prompt": ""}, {"id": "a", "prompt": "Hi"}]
    shard(write_lines(tmp_path / "p.jsonl", rows), tmp_path / "out")
    assert texts(tmp_path / "out/00000.parquet") == ["Hi"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.characters(codec=None),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
rows_of_any_kind = st.lists(
    json_values | st.dictionaries(st.sampled_from(["prompt", "messages", "id"]), json_values)
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows_of_any_kind)
def test_whatever_the_rows_none_is_lost(tmp_path, rows):
    source = write_lines(tmp_path / "p.jsonl", [HELLO, *rows])
    manifest = shard(source, tmp_path / "out")
    written = pq.read_metadata(tmp_path / "out/00000.parquet").num_rows
    refused = pq.read_metadata(tmp_path / "out/rejected.parquet").num_rows
    assert written + refused == len(rows) + 1
    assert (manifest["accepted"], manifest["rejected"]) == (written, refused)


# Stops


def test_too_many_refused_rows_stop_the_step_with_counts_places_and_remedy(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", [*numbered(7), 1, 2, {"prompt": ""}])
    with pytest.raises(StepError) as caught:
        shard(source, tmp_path / "out", max_rejected=0.2)
    message = str(caught.value)
    for part in (
        "3 of 10 rows",
        "20.0%",
        "2 not_an_object",
        "1 empty",
        "p.jsonl:8",
        "p.jsonl:10",
        "prompts.max_rejected",
    ):
        assert part in message
    assert not (tmp_path / "out/00000.parquet").exists()
    assert not (tmp_path / "out/manifest.json").exists()


def test_as_many_refused_rows_as_allowed_do_not_stop_it(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", [*numbered(71), *[0] * 29])
    assert shard(source, tmp_path / "out", max_rejected=0.29)["rejected"] == 29


@pytest.mark.parametrize("content", ["", "\n\n", '{"prompt": ""}\n'])
def test_a_source_without_any_prompt_stops_the_step(tmp_path, content):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(StepError, match=r"cannot be used as prompts|holds no rows"):
        shard(tmp_path / "p.jsonl", tmp_path / "out")


def test_fewer_prompts_than_shards_stop_the_step(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", [*numbered(2), 3])
    with pytest.raises(StepError, match="too few prompts for the shards") as caught:
        shard(source, tmp_path / "out", shards=3)
    assert "2 accepted" in str(caught.value)
    assert not (tmp_path / "out/00000.parquet").exists()


def test_a_canary_that_leaves_a_shard_without_prompts_stops_the_step(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", numbered(6))
    assert shard(source, tmp_path / "enough", shards=2, canary=4)["canary"]["prompts"] == 4
    with pytest.raises(StepError, match="too few prompts for the shards") as caught:
        shard(source, tmp_path / "out", shards=2, canary=5)
    assert "at least 7 accepted prompts: one for each of 2 shards, and 5 for the canary" in str(
        caught.value
    )
    assert not (tmp_path / "out/canary.parquet").exists()


def test_a_source_that_grows_while_it_is_read_stops_the_step(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "p.jsonl", numbered(3))

    def read_and_grow(path: Path) -> Iterator[SourceRow]:
        yield from read_rows(path)
        write_lines(source, numbered(4))

    monkeypatch.setattr(step, "read_rows", read_and_grow)
    with pytest.raises(StepError, match="changed while"):
        shard(source, tmp_path / "out")


def test_a_prompt_lost_between_the_passes_stops_the_step_before_the_manifest(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "p.jsonl", [*numbered(3), "no prompt"])
    monkeypatch.setattr(step, "assign_rows", lambda rows, shards, assign: [rows[1:]])
    with pytest.raises(StepError, match=r"do not balance(.|\n)*4 rows read(.|\n)*2 \+ 1"):
        shard(source, tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_an_old_manifest_does_not_outlive_shards_that_could_not_all_be_written(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", numbered(3))
    shard(source, tmp_path / "out")
    (tmp_path / "out/00001.parquet").mkdir()
    with pytest.raises(OSError, match=r"00001\.parquet"):
        shard(source, tmp_path / "out", shards=2)
    assert not (tmp_path / "out/manifest.json").exists()


# Memory


def test_long_prompts_make_smaller_row_groups(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "p.jsonl", [{"prompt": f"{n}" * 500} for n in range(9)])
    monkeypatch.setattr(step, "GROUP_BYTES", 2000)
    shard(source, tmp_path / "out")
    metadata = pq.read_metadata(tmp_path / "out/00000.parquet")
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [2] * 4 + [1]


# VmHWM, not ru_maxrss, which starts at the size of the process that forked this one
MEASURE = """
import re, sys
from pathlib import Path
from shard_prompts import shard_prompts
shard_prompts(Path(sys.argv[1]), Path(sys.argv[2]), [f"{n:05d}" for n in range(20)],
              canary=256, assign=sys.argv[3], max_rejected=0.0, limit=None, fingerprint="f")
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def peak_kib(source: Path, out_dir: Path, assign: str) -> int:
    """Return the peak memory of the step in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(out_dir), assign],
        cwd=SCRIPTS,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


@pytest.mark.parametrize("assign", ["interleave", "contiguous"])
def test_memory_grows_by_the_digests_of_the_rows_only(tmp_path, assign):
    few, many = 20_000, 200_000
    line = json.dumps({"prompt": "%d " + "word " * 100}) + "\n"
    for count in (few, many):
        with open(tmp_path / f"{count}.jsonl", "w") as handle:
            handle.writelines(line % number for number in range(count))
    small, large = (
        peak_kib(tmp_path / f"{count}.jsonl", tmp_path / f"out{count}", assign)
        for count in (few, many)
    )
    bytes_a_row = (large - small) * 1024 / (many - few)
    assert bytes_a_row < 400  # two digests in sets; a prompt here takes over 500 bytes
