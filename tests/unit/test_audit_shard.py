"""The audit of one shard: evidence always, a verdict that the data deserves."""

import json
from pathlib import Path

import pytest

from rebuild.errors import StepError
from rebuild.files import sha256_file
from tests.support.shards import (
    clean_answers,
    disaster_answers,
    failed_checks,
    make_answer,
    make_truncated,
    make_unanswered,
    write_shard,
)


def test_the_evidence_has_everything_that_a_reader_needs(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(20))
    evidence = shard.audit()
    assert set(evidence) == {
        "schema_version",
        "shard",
        "verdict",
        "tokenized_sha256",
        "generated_fingerprint",
        "rows",
        "checks",
        "distribution",
        "examples",
    }
    assert evidence["shard"] == "00000"
    assert evidence["tokenized_sha256"] == sha256_file(shard.tokenized)
    assert evidence["generated_fingerprint"] == "generated-1"
    for check in evidence["checks"]:
        assert {"name", "value", "limit", "unit", "verdict", "severity", "why"} <= check.keys()


def test_the_evidence_on_a_bad_shard_is_written_all_the_same(tmp_path: Path) -> None:
    evidence = write_shard(tmp_path, disaster_answers(100)).audit()
    assert evidence["verdict"] == "fail"
    [mode] = [check for check in evidence["checks"] if check["name"] == "mask_sum_mode_share"]
    assert (mode["value"], mode["count"], mode["of"]) == (0.87, 87, 100)
    assert mode["severity"] == 8.7
    assert len(mode["evidence"]) == 10
    assert r"<think>\n\n</think>\n\nOK." in mode["evidence"][0]["seen"]


def test_rows_are_counted_by_status(tmp_path: Path) -> None:
    answers = [make_answer("a"), make_truncated("b"), make_answer("c", status="tool_calls")]
    answers += [make_unanswered("d", "skipped"), make_unanswered("e", "error")]
    rows = write_shard(tmp_path, answers).audit()["rows"]
    assert {name: count for name, count in rows.items() if name != "dropped"} == {
        "prompts": 5,
        "generated": 5,
        "ok": 1,
        "truncated": 1,
        "tool_calls": 1,
        "skipped": 1,
        "error": 1,
        "tokenized": 3,
    }


def test_the_distribution_tells_lengths_finish_reasons_and_sources(tmp_path: Path) -> None:
    answers = [make_answer("a", tokens=10), make_answer("b", tokens=10, source="code")]
    answers += [make_answer("c", tokens=30), make_truncated("d", 50), make_unanswered("e", "error")]
    seen = write_shard(tmp_path, answers).audit()["distribution"]
    assert seen["mask_sum"]["total"] == 100
    assert seen["mask_sum"]["quantiles"]["0.5"] == 20
    assert seen["mask_sum"]["quantiles"]["1"] == 50
    assert seen["mask_sum"]["most_frequent"] == [
        {"value": 10, "rows": 2},
        {"value": 30, "rows": 1},
        {"value": 50, "rows": 1},
    ]
    assert seen["finish_reason"] == {"length": 1, "none": 1, "stop": 3}
    nothing_lost = {"prompts": 1, "generated": 1, "answered": 1, "trained": 1, "loss_tokens": 10}
    assert seen["sources"]["code"] == nothing_lost
    one_lost = {"prompts": 4, "generated": 4, "answered": 3, "trained": 3, "loss_tokens": 90}
    assert seen["sources"]["test"] == one_lost


@pytest.mark.parametrize("rows", [0, 3, 20])
def test_the_evidence_is_strict_json_and_the_same_for_the_same_data(
    tmp_path: Path, rows: int
) -> None:
    shard = write_shard(tmp_path, clean_answers(rows))
    shard.audit()
    first = shard.evidence.read_text()
    shard.audit()
    assert shard.evidence.read_text() == first
    json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_model_output_in_the_evidence_is_short_and_has_no_control_characters(
    tmp_path: Path,
) -> None:
    hostile = "\x1b[2J\u202e" + "x" * 10_000
    answers = [make_answer(f"p{i}", tokens=7, content=hostile) for i in range(20)]
    shard = write_shard(tmp_path, answers)
    evidence = shard.audit()
    assert "trivial_answer_share" in failed_checks(evidence)
    assert "\x1b" not in str(evidence) and "\u202e" not in str(evidence)
    assert all(
        len(case["seen"]) <= 200 for check in evidence["checks"] for case in check["evidence"]
    )


def test_a_limit_in_the_config_replaces_the_default(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, [*clean_answers(9), make_unanswered("x", "skipped")])
    assert failed_checks(shard.audit()) == set()
    assert failed_checks(shard.audit(skipped_share=0)) == {"skipped_share"}


def test_a_limit_for_an_unknown_check_stops_and_names_the_nearest(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(3))
    with pytest.raises(StepError, match=r"did you mean 'truncated_share'\?"):
        shard.audit(truncation_share=0.5)
    assert not shard.evidence.exists()


def test_a_damaged_input_stops_and_is_named(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(3))
    shard.tokenized.write_bytes(shard.tokenized.read_bytes()[:100])
    with pytest.raises(StepError, match=r"tokenized/00000\.parquet"):
        shard.audit()
