"""Joining checks over shards: verdict, value and rows of all, and the worst of them with its samples."""

from typing import Any

from rebuild.report.checks import CheckRow, join_checks
from rebuild.report.evidence import FAIL, PASS, UNJUDGED, WAIVED, Judged
from tests.support.judged import evidence

PERCENT = "\u202f%"


def judged(name: str, verdict: str = PASS, **keywords: Any) -> Judged:
    return Judged(name, verdict, "known" if verdict == WAIVED else None, evidence(name, **keywords))


def joined(*parts: Judged) -> dict[str, CheckRow]:
    return {row.name: row for row in join_checks(list(parts))}


def test_a_share_over_all_shards_is_that_of_all_their_rows():
    row = joined(judged("00000"), judged("00001", FAIL, rows=100, empty=87))["empty_answer_share"]
    assert (row.verdict, row.value, row.rows) == (FAIL, f"29{PERCENT}", "87 of 300")
    assert row.worst == ("00001", f"87{PERCENT}")
    assert row.limit == f"1{PERCENT}"


def test_of_one_shard_its_own_value_is_shown():
    row = joined(judged("00000"))["median_loss_tokens"]
    median = judged("00000").evidence["checks"][3]["value"]
    assert (row.value, row.limit, row.worst) == (f"{median:g} tokens", "≥ 32 tokens", None)


def test_a_median_over_several_shards_is_a_range():
    row = joined(judged("00000", FAIL, rows=100, empty=87), judged("00001"))["median_loss_tokens"]
    assert row.value.startswith("7 to ")
    assert row.worst == ("00000", "7 tokens")


def test_rows_are_added_up():
    one, two = judged("00000"), judged("00001", FAIL)
    two.evidence["checks"][0] |= {"verdict": FAIL, "value": 3, "count": 3, "severity": 3.0}
    row = joined(one, two)["unbalanced_rows"]
    assert (row.verdict, row.value, row.rows) == (FAIL, "3 rows", "3 of 400")


def test_failed_shards_come_worst_first():
    parts = [judged(f"0000{n}", FAIL, empty=empty) for n, empty in enumerate([10, 150, 50])]
    assert joined(*parts)["empty_answer_share"].failed == ["00001", "00002", "00000"]


def test_a_check_that_failed_in_waived_shards_only_is_waived():
    row = joined(judged("00000"), judged("00001", WAIVED, empty=100))["empty_answer_share"]
    assert (row.verdict, row.waived, row.failed) == (WAIVED, ["00001"], [])


def test_a_check_that_failed_elsewhere_too_is_failed_and_its_samples_are_from_there():
    parts = [judged("00000", WAIVED, empty=190), judged("00001", FAIL, empty=100)]
    row = joined(*parts)["empty_answer_share"]
    assert (row.verdict, row.failed, row.waived) == (FAIL, ["00001"], ["00000"])
    assert {case.shard for case in row.cases} == {"00001"}


def test_examples_are_of_many_shards_before_they_are_many_of_one():
    parts = [judged(f"0000{n}", FAIL, empty=100) for n in range(4)]
    shards = [case.shard for case in joined(*parts)["empty_answer_share"].cases]
    assert set(shards[:4]) == {part.name for part in parts}
    assert len(shards) == 8


def test_what_was_judged_nowhere_is_not_judged():
    row = joined(judged("00000", rows=0), judged("00001", rows=0))["empty_answer_share"]
    assert (row.verdict, row.value, row.rows, row.judged) == (UNJUDGED, "–", "–", 0)


def test_what_was_judged_somewhere_has_the_values_of_there():
    row = joined(judged("00000", rows=0), judged("00001", rows=100))["truncated_share"]
    assert (row.verdict, row.value, row.rows, row.judged) == (PASS, f"5{PERCENT}", "5 of 100", 1)


def test_a_check_with_few_keys_is_shown_with_what_it_has():
    foreign = Judged(
        "x", FAIL, None, {"checks": [{"name": "odd", "verdict": FAIL, "evidence": []}, 3, {}]}
    )
    (row,) = join_checks([foreign])
    assert (row.verdict, row.value, row.limit, row.rows, row.seen) == (FAIL, "–", "–", "–", "")


def test_a_difference_of_shares_is_in_per_cent():
    check = {
        "name": "shift",
        "verdict": PASS,
        "value": 0.125,
        "limit": 0.25,
        "unit": "difference of shares",
    }
    (row,) = join_checks([Judged("00000", PASS, None, {"checks": [check | {"evidence": []}]})])
    assert (row.value, row.limit) == (f"12.5{PERCENT}", f"25{PERCENT}")
