"""Approval of a whole run: what passes, what stops, and what a waiver needs."""

from pathlib import Path
from typing import Any

import pytest

from approve_run import approve_run
from audit_run import audit_run
from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from tests.support.shards import Shard, clean_answers, disaster_answers, write_shard


def judged(tmp_path: Path, answers: list[dict[str, Any]]) -> Path:
    """Write the evidence on a run of one shard, and return its path."""
    shard = write_shard(tmp_path, answers)
    shard.audit()
    evidence = tmp_path / "audit" / "run.json"
    audit_run([shard.evidence], [shard.digest], evidence, limits={}, accept={})
    return evidence


def approve(evidence: Path, accept: dict[Any, Any] | None = None) -> dict[str, Any]:
    approved = evidence.with_suffix(".approved")
    approve_run(evidence, approved, accept=accept or {})
    approval: dict[str, Any] = read_json(approved)
    return approval


def test_a_sound_run_is_approved(tmp_path: Path) -> None:
    evidence = judged(tmp_path, clean_answers(30))
    assert approve(evidence) == {"shard": "run", "verdict": "pass", "reason": None}


def test_a_run_that_fails_stops_with_its_three_worst_reasons_and_the_ways_out(
    tmp_path: Path,
) -> None:
    evidence = judged(tmp_path, disaster_answers(100))
    with pytest.raises(StepError) as stopped:
        approve(evidence)
    assert "the whole run failed its audit" in str(stopped.value)
    reasons = [line.split()[1] for line in stopped.value.seen.splitlines()[1:]]
    assert reasons == ["empty_answer_share", "repeated_answer_share", "mask_sum_mode_share"]
    assert str(evidence) in stopped.value.where
    assert "audit.limits" in stopped.value.remedy
    assert 'audit: {accept: {run: "the reason"}}' in stopped.value.remedy
    assert "rm " not in stopped.value.remedy  # no shard is at fault alone
    assert not evidence.with_suffix(".approved").exists()


def test_a_run_that_is_waived_with_a_reason_passes(tmp_path: Path) -> None:
    approval = approve(judged(tmp_path, disaster_answers(100)), {"run": " one-word answers "})
    assert approval == {"shard": "run", "verdict": "waived", "reason": "one-word answers"}


def test_waivers_of_shards_are_none_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="the whole run failed"):
        approve(judged(tmp_path, disaster_answers(100)), {"00000": "fine", 0: "fine"})


@pytest.mark.parametrize("reason", ["", "\n", None, True, 7])
def test_a_waiver_of_the_run_without_a_reason_is_refused(tmp_path: Path, reason: object) -> None:
    evidence = judged(tmp_path, disaster_answers(100))
    with pytest.raises(StepError, match="has no reason") as stopped:
        approve(evidence, {"run": reason})
    assert 'audit: {accept: {"run": "the reason"}}' in stopped.value.remedy


@pytest.mark.parametrize("text", ["", "{", "null", "{}", '{"verdict": "pass", "shard": "run"}'])
def test_evidence_that_no_audit_wrote_approves_nothing(tmp_path: Path, text: str) -> None:
    evidence = tmp_path / "run.json"
    evidence.write_text(text)
    with pytest.raises(StepError, match="cannot read the audit's evidence") as stopped:
        approve(evidence)
    assert f"rm {evidence}" in stopped.value.remedy


def test_evidence_of_an_earlier_version_approves_nothing(tmp_path: Path) -> None:
    evidence = judged(tmp_path, clean_answers(30))
    write_json(evidence, read_json(evidence) | {"schema_version": "1"})
    with pytest.raises(StepError, match="cannot read the audit's evidence") as stopped:
        approve(evidence)
    assert "schema_version '1'" in stopped.value.seen
    assert "schema_version '2'" in stopped.value.expected


def test_judging_the_same_shards_again_gives_the_same_approval(tmp_path: Path) -> None:
    evidence = judged(tmp_path, clean_answers(30))
    approve(evidence)
    first = evidence.with_suffix(".approved").read_bytes()
    shard = Shard(tmp_path)
    shard.audit()
    audit_run([shard.evidence], [shard.digest], evidence, limits={}, accept={})
    approve(evidence)
    assert evidence.with_suffix(".approved").read_bytes() == first
