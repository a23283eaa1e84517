"""Reading evidence: verdicts and waivers as they hold for this data, and foreign or broken files as what they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from rebuild.report.evidence import (
    FAIL,
    PASS,
    READ_SHARDS,
    UNJUDGED,
    WAIVED,
    JobTimes,
    Judged,
    read_judged,
    read_shard,
    read_times,
)
from tests.support.judged import evidence, write, write_run, write_time


def read(tmp_path: Path, part: dict[str, Any], **keywords: Any) -> Judged:
    (path,) = write_run(tmp_path, part, **keywords)
    return read_shard(path, {})


def test_the_verdict_is_the_audits(tmp_path: Path):
    assert read(tmp_path, evidence()).verdict == PASS
    assert read(tmp_path, evidence(empty=100)).verdict == FAIL


def test_a_failed_shard_that_was_approved_for_a_reason_is_waived(tmp_path: Path):
    part = read(tmp_path, evidence(empty=100), waived={"00000": "one word each"})
    assert (part.verdict, part.reason) == (WAIVED, "one word each")


def test_a_waiver_in_the_configuration_counts_before_it_is_approved(tmp_path: Path):
    (path,) = write_run(tmp_path, evidence(empty=100))
    part = read_shard(path, {"00000": "known"})
    assert (part.verdict, part.reason) == (WAIVED, "known")


def test_a_waiver_of_other_data_does_not_count(tmp_path: Path):
    (path,) = write_run(tmp_path, evidence(empty=100), waived={"00000": "one word each"})
    write(path, evidence(empty=100, seed=2))
    assert read_shard(path, {}).verdict == FAIL


def test_a_shard_that_passes_is_not_called_waived(tmp_path: Path):
    (path,) = write_run(tmp_path, evidence())
    assert read_shard(path, {"00000": "never needed"}).verdict == PASS


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"fail"', b"\xff\xfe", b'{"verdict": ["pass"]}', b'{"checks": 3}'],
    ids=repr,
)
def test_evidence_that_cannot_be_read_is_not_judged_and_no_error(tmp_path: Path, content: bytes):
    path = tmp_path / "00007.json"
    path.write_bytes(content)
    part = read_shard(path, {})
    assert (part.name, part.verdict) == ("00007", UNJUDGED)
    assert part.checks == []


def test_evidence_that_is_missing_is_said_to_be(tmp_path: Path):
    assert read_shard(tmp_path / "00007.json", {}).note == "00007.json is missing or cannot be read"


def test_a_dataset_without_a_shard_has_the_name_of_its_file(tmp_path: Path):
    path = write(tmp_path / "dataset.json", evidence(None))
    assert read_shard(path, {}).name == "dataset"


def test_halves_of_surrogate_pairs_are_read(tmp_path: Path):
    path = tmp_path / "00000.json"
    path.write_text('{"verdict": "pass", "examples": [{"answer": "half \\ud800"}]}')
    assert read_shard(path, {}).evidence["examples"] == [{"answer": "half \ud800"}]


def test_long_texts_are_cut_and_say_so(tmp_path: Path):
    part = evidence()
    part["examples"][0]["answer"] = "word " * 100_000
    answer = read(tmp_path, part).evidence["examples"][0]["answer"]
    assert len(answer) < 30_000
    assert answer.endswith("… (500,000 characters)")


def test_of_many_shards_some_keep_their_conversations_and_those_that_failed_first(tmp_path: Path):
    parts = [evidence(f"{n:05d}", rows=10, empty=5 * (n >= 140)) for n in range(150)]
    judged = read_judged(write_run(tmp_path, *parts), {})
    kept = [part for part in judged if part.evidence["examples"]]
    assert sum(part.verdict == FAIL for part in kept) == 10
    assert len(kept) == READ_SHARDS + 10


def test_times_are_added_up_by_rule_the_longest_first(tmp_path: Path):
    write_time(tmp_path / "generate_shard" / "00000.tsv", 100.5)
    write_time(tmp_path / "generate_shard" / "00001.tsv", 50)
    write_time(tmp_path / "stage_model.tsv", 200)
    assert read_times(tmp_path) == [
        JobTimes("stage_model", 1, 200.0, 200.0),
        JobTimes("generate_shard", 2, 150.5, 100.5),
    ]


@pytest.mark.parametrize("content", ["", "s\th:m:s\n", "s\th:m:s\n-\t-\n", "a\tb\n1\t2\n"])
def test_a_time_that_is_none_is_left_out(tmp_path: Path, content: str):
    (tmp_path / "stage_model.tsv").write_text(content)
    assert read_times(tmp_path) == []


def test_no_benchmarks_are_no_times(tmp_path: Path):
    assert read_times(tmp_path / "benchmarks") == []


def test_a_verdict_that_is_none_of_ours_is_not_judged(tmp_path: Path):
    path = tmp_path / "00000.json"
    path.write_text(json.dumps({"verdict": "splendid", "shard": "00000"}))
    assert read_shard(path, {}).verdict == UNJUDGED
