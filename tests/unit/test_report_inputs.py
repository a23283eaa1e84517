"""What the report waits for: all shards, or a canary alone that stops them."""

from pathlib import Path

import pytest

from rebuild.report.inputs import evidence_to_report
from tests.support.judged import evidence, write, write_run

SHARDS = ["canary", "00000", "00001"]


def awaited(results: Path, shards: list[str] = SHARDS, **accept: str) -> list[str]:
    paths = evidence_to_report(None, results=results, shards=shards, accept=accept)
    return [Path(path).stem for path in paths]


def test_before_anything_is_judged_all_shards_and_the_run_are_awaited(tmp_path: Path):
    assert awaited(tmp_path) == [*SHARDS, "run"]


def test_a_failed_canary_is_reported_on_alone(tmp_path: Path):
    write_run(tmp_path, evidence("canary", empty=100))
    assert awaited(tmp_path) == ["canary"]
    assert evidence_to_report(None, results=tmp_path, shards=SHARDS, accept={}) == [
        f"{tmp_path}/audit/canary.json"
    ]


def test_a_canary_that_passed_or_is_waived_stops_nobody(tmp_path: Path):
    write_run(tmp_path / "passed", evidence("canary"))
    write_run(tmp_path / "waived", evidence("canary", empty=100), waived={"canary": "known"})
    write_run(tmp_path / "accepted", evidence("canary", empty=100))
    assert awaited(tmp_path / "passed") == [*SHARDS, "run"]
    assert awaited(tmp_path / "waived") == [*SHARDS, "run"]
    assert awaited(tmp_path / "accepted", canary="known") == [*SHARDS, "run"]


def test_a_run_without_a_canary_does_not_look_for_one(tmp_path: Path):
    write(tmp_path / "audit" / "canary.json", {"verdict": "fail"})
    assert awaited(tmp_path, ["00000"]) == ["00000", "run"]


@pytest.mark.parametrize("content", ["", "[]", "null", "{}"])
def test_evidence_that_cannot_be_read_stops_nobody(tmp_path: Path, content: str):
    write(tmp_path / "audit" / "canary.json", {})
    (tmp_path / "audit" / "canary.json").write_text(content)
    assert awaited(tmp_path) == [*SHARDS, "run"]
