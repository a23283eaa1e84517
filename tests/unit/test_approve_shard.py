"""Approval: what passes, what stops, and what a waiver needs."""

from pathlib import Path
from typing import Any

import pytest

from approve_shard import approve_shard
from rebuild.errors import StepError
from rebuild.files import read_json
from rebuild.tables import HIDDEN_STATES, TableWriter
from tests.support.shards import Shard, clean_answers, disaster_answers, write_shard


def audited(tmp_path: Path, answers: list[dict[str, Any]]) -> Shard:
    shard = write_shard(tmp_path, answers)
    shard.audit()
    return shard


def approve(shard: Shard, accept: dict[Any, Any] | None = None) -> dict[str, Any]:
    index = shard.run / "hidden_states" / f"{shard.name}.parquet"
    approve_shard(shard.evidence, shard.approved, accept=accept or {}, index=index)
    approval: dict[str, Any] = read_json(shard.approved)
    return approval


def test_a_shard_of_empty_answers_is_never_approved_and_the_error_says_why(tmp_path: Path) -> None:
    shard = audited(tmp_path, disaster_answers(100))
    with pytest.raises(StepError) as stop:
        approve(shard)
    assert not shard.approved.exists()
    message = str(stop.value)
    assert "shard 00000 failed its audit" in message
    assert "empty_answer_share 0.87 (limit 0.01, share of rows): 87 of 100 rows" in message
    assert "mask_sum_mode_share 0.87 (limit 0.1, share of rows): 87 of 100 rows" in message
    assert "exactly 7 supervised tokens" in message
    assert r"p0_gen0: answer '<think>\n\n</think>\n\nOK.'" in message
    assert str(shard.evidence) in message


def test_the_error_names_the_ways_out_as_they_are_typed(tmp_path: Path) -> None:
    shard = audited(tmp_path, disaster_answers(20))
    with pytest.raises(StepError) as stop:
        approve(shard)
    assert f"rm {shard.generated} {shard.tokenized} {shard.evidence}" in stop.value.remedy
    assert 'audit: {accept: {"00000": "the reason"}}' in stop.value.remedy


def test_three_reasons_are_given_the_worst_first(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, disaster_answers(100))
    shard.audit(dropped_share=-1)
    with pytest.raises(StepError) as stop:
        approve(shard)
    reasons = [line.split()[1] for line in stop.value.seen.splitlines()[1:]]
    assert reasons == ["empty_answer_share", "repeated_answer_share", "mask_sum_mode_share"]


def test_a_clean_shard_is_approved_with_the_hash_of_what_was_judged(tmp_path: Path) -> None:
    shard = audited(tmp_path, clean_answers(50))
    assert approve(shard) == {
        "shard": "00000",
        "verdict": "pass",
        "reason": None,
        "tokenized_sha256": read_json(shard.evidence)["tokenized_sha256"],
    }


def test_judging_the_same_data_again_gives_the_same_approval(tmp_path: Path) -> None:
    shard = audited(tmp_path, clean_answers(50))
    approve(shard)
    first = shard.approved.read_bytes()
    shard.tokenize()
    shard.audit()
    approve(shard)
    assert shard.approved.read_bytes() == first


@pytest.mark.parametrize("key", ["00000", 0, "0"])
def test_a_failed_shard_passes_with_a_reason_however_its_number_was_read(
    tmp_path: Path, key: object
) -> None:
    shard = audited(tmp_path, disaster_answers(20))
    approval = approve(shard, {key: "short on purpose"})
    assert (approval["verdict"], approval["reason"]) == ("waived", "short on purpose")


def test_a_waiver_for_another_shard_does_not_help(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="failed its audit"):
        approve(audited(tmp_path, disaster_answers(20)), {"00001": "another", "canary": "another"})


@pytest.mark.parametrize("reason", ["", "  ", None, True])
def test_a_waiver_without_a_reason_is_refused(tmp_path: Path, reason: object) -> None:
    shard = audited(tmp_path, disaster_answers(20))
    with pytest.raises(StepError, match="waiver for shard 00000 has no reason"):
        approve(shard, {"00000": reason})
    assert not shard.approved.exists()


def test_a_waiver_of_a_shard_that_passes_is_just_a_pass(tmp_path: Path) -> None:
    approval = approve(audited(tmp_path, clean_answers(20)), {"00000": "to be safe"})
    assert (approval["verdict"], approval["reason"]) == ("pass", None)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"verdict": "pass"}', "\ufeff"])
def test_evidence_that_no_audit_wrote_approves_nothing(tmp_path: Path, text: str) -> None:
    shard = Shard(tmp_path)
    shard.evidence.parent.mkdir(parents=True)
    shard.evidence.write_text(text)
    with pytest.raises(StepError, match="cannot read the audit's evidence"):
        approve(shard)
    assert not shard.approved.exists()


def test_new_samples_are_not_approved_beside_hidden_states_of_old_ones(tmp_path: Path) -> None:
    shard = audited(tmp_path, clean_answers(20))
    index = tmp_path / "hidden_states" / "00000.parquet"
    write_index(index, tokenized_sha256="of other samples")
    with pytest.raises(
        StepError, match=r"of other samples than the ones that were judged"
    ) as stopped:
        approve(shard)
    assert f"rm -r {index} {index.with_suffix('')}" in str(stopped.value)
    assert not shard.approved.exists()
    write_index(index, tokenized_sha256=read_json(shard.evidence)["tokenized_sha256"])
    assert approve(shard)["verdict"] == "pass"


def write_index(path: Path, **facts: str) -> None:
    """Write an index of hidden states without rows."""
    with TableWriter(path, HIDDEN_STATES, facts):
        pass


@pytest.mark.parametrize("answers", [clean_answers(20), disaster_answers(20)])
def test_what_an_earlier_approval_made_possible_goes_when_the_shard_is_refused(
    tmp_path: Path, answers: list[dict[str, Any]]
) -> None:
    shard = audited(tmp_path, answers)
    earlier = [tmp_path / "run.approved", tmp_path / "00000.jsonl"]
    for path in earlier:
        path.touch()
    refused = shard.audit()["verdict"] == "fail"
    try:
        approve_shard(
            shard.evidence,
            shard.approved,
            accept={},
            index=tmp_path / "none.parquet",
            withdrawn=[*earlier, tmp_path / "never-there"],
        )
    except StepError:
        assert refused
    assert [path.exists() for path in earlier] == [not refused] * 2
