"""The approval that the expensive phases rely on: it is held against the very file that was judged."""

from pathlib import Path
from typing import Any

import pytest

from rebuild.audit.approval import approve, check_approval, read_verdict
from rebuild.errors import StepError
from rebuild.files import sha256_file, write_json


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A tokenized file, and its approval."""
    tokenized, approved = tmp_path / "00000.parquet", tmp_path / "00000.approved"
    tokenized.write_bytes(b"rows")
    write_json(approved, {"shard": "00000", "tokenized_sha256": sha256_file(tokenized)})
    return tokenized, approved


def verdict(shard: str, *failed: str) -> dict[str, Any]:
    """Return evidence in which the named checks failed, the first one worst."""
    checks = [
        {
            "name": name,
            "verdict": "fail",
            "value": 0.5,
            "limit": 0.1,
            "unit": "share of rows",
            "severity": 9.0 - place,
            "seen": "5 of 10 rows are bad",
            "evidence": [{"sample_id": "p7_gen0", "seen": "answer 'OK.'"}],
        }
        for place, name in enumerate(failed)
    ]
    result = "fail" if failed else "pass"
    return {"schema_version": "2", "shard": shard, "verdict": result, "checks": checks}


def test_the_very_file_that_was_approved_goes_on(files: tuple[Path, Path]) -> None:
    tokenized, approved = files
    assert check_approval(tokenized, approved) == sha256_file(tokenized)


def test_another_file_stops_with_both_hashes_and_what_to_do(files: tuple[Path, Path]) -> None:
    tokenized, approved = files
    before = sha256_file(tokenized)
    tokenized.write_bytes(b"other rows")
    with pytest.raises(StepError, match="not the ones that were approved") as stopped:
        check_approval(tokenized, approved)
    assert before[:12] in stopped.value.expected
    assert sha256_file(tokenized)[:12] in stopped.value.seen
    assert f"rm {approved}" in stopped.value.remedy


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"shard": "run"}', "\ufeff{}"])
def test_an_approval_that_is_none_stops_and_is_named(files: tuple[Path, Path], text: str) -> None:
    tokenized, approved = files
    approved.write_text(text)
    with pytest.raises(StepError, match="cannot read the approval") as stopped:
        check_approval(tokenized, approved)
    assert f"rm {approved}" in stopped.value.remedy


def test_the_refusal_of_a_shard_names_samples_files_and_commands(tmp_path: Path) -> None:
    evidence = tmp_path / "audit" / "00003.json"
    with pytest.raises(StepError) as stopped:
        approve(verdict("00003", "a", "b", "c", "d"), evidence, {})
    message = str(stopped.value)
    assert "shard 00003 failed its audit (4 of 4 checks)" in message
    assert message.count("\n    - ") == 3
    generated, tokenized = (
        tmp_path / name / "00003.parquet" for name in ("generated", "tokenized")
    )
    assert f"show_masks.py {tokenized} --sample p7_gen0" in message
    assert f"rm {generated} {tokenized} {evidence}" in message
    assert 'audit: {accept: {"00003": "the reason"}}' in message


def test_the_refusal_of_the_canary_says_that_nothing_else_starts(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="no other shard is generated") as stopped:
        approve(verdict("canary", "a"), tmp_path / "audit" / "canary.json", {"00000": "another"})
    assert 'audit: {accept: {"canary": "the reason"}}' in stopped.value.remedy


def test_the_canary_can_be_waived_by_its_name(tmp_path: Path) -> None:
    approval = approve(verdict("canary", "a"), tmp_path, {"canary": "short answers are wanted"})
    assert approval == {
        "shard": "canary",
        "verdict": "waived",
        "reason": "short answers are wanted",
    }


def test_only_evidence_of_this_version_is_read(tmp_path: Path) -> None:
    evidence = tmp_path / "00000.json"
    write_json(evidence, verdict("00000"))
    assert read_verdict(evidence) == verdict("00000")
    write_json(evidence, verdict("00000") | {"schema_version": "1"})
    with pytest.raises(StepError, match="cannot read the audit's evidence"):
        read_verdict(evidence)
