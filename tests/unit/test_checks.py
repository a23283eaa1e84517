"""Every fault that the audit knows: a shard built with just that fault fails just that check, and clean data none."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rebuild.audit.balance import compare_order
from rebuild.audit.checks import CHECKS
from rebuild.audit.set_checks import SET_CHECKS
from rebuild.generate.conversation import begin_conversation
from tests.support.shards import (
    QWEN3_PROMPT,
    REPLY,
    SYSTEM,
    Row,
    ask,
    clean_answers,
    disaster_answers,
    failed_checks,
    history,
    make_answer,
    make_truncated,
    make_unanswered,
    rewrite,
    write_generated,
    write_prompts,
    write_shard,
)

Change = Callable[[list[Row]], list[Row]]


def first_row(**changes: object) -> Change:
    """Return a change of the first row's columns."""
    return lambda rows: [rows[0] | changes, *rows[1:]]


def tool_conversation() -> list[Row]:
    """Return the rows of a prompt of two user turns, the first of them answered by way of a tool."""
    called, told, thanked = (make_answer("tool", turn, tokens=50 + turn) for turn in range(3))
    calls = {"status": "tool_calls", "finish_reason": "tool_calls", "tool_calls": "[{}]"}
    result = {"role": "tool", "content": "21 degrees"}
    told["messages"] = [*history("tool", 0), REPLY, result]
    thanked["messages"] = [*told["messages"], REPLY, ask("tool", 1)]
    return [called | calls, told, thanked]


def shifted_mask(rows: list[Row]) -> list[Row]:
    return [row | {"loss_mask": [*row["loss_mask"][1:], 0]} for row in rows]


def mask_over_the_prompt(rows: list[Row]) -> list[Row]:
    return [
        row | {"loss_mask": [1] * row["seq_len"], "loss_tokens": row["seq_len"]} for row in rows
    ]


def mask_with_a_hole(rows: list[Row]) -> list[Row]:
    mask = list(rows[0]["loss_mask"])
    mask[len(QWEN3_PROMPT) + 2] = 0
    return [rows[0] | {"loss_mask": mask, "loss_tokens": sum(mask)}, *rows[1:]]


def unsupervised_end(rows: list[Row]) -> list[Row]:
    ids, mask = [*rows[0]["input_ids"], 198], [*rows[0]["loss_mask"], 0]
    return [rows[0] | {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)}, *rows[1:]]


def evidence_samples(evidence: dict[str, object], name: str) -> list[str]:
    [check] = [check for check in evidence["checks"] if check["name"] == name]  # type: ignore[attr-defined]
    return [case["sample_id"] for case in check["evidence"]]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 16, 30, 100, 400])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_clean_data_fails_no_check(tmp_path: Path, rows: int, seed: int) -> None:
    evidence = write_shard(tmp_path, clean_answers(rows, seed)).audit()
    assert failed_checks(evidence) == set()
    assert evidence["verdict"] == "pass"


def test_clean_multi_turn_data_with_tools_and_a_few_faults_fails_no_check(tmp_path: Path) -> None:
    answers = clean_answers(60)
    answers += [make_answer("talk", turn, tokens=50 + turn) for turn in range(4)]
    answers += [make_answer("tool", tokens=40, status="tool_calls", content="", tool_calls="[{}]")]
    answers += [make_truncated("cut"), make_unanswered("gone", "error")]
    answers += [make_unanswered("long", "skipped"), make_answer("short", tokens=3, content="Yes.")]
    assert failed_checks(write_shard(tmp_path, answers).audit()) == set()


def test_clean_data_whose_rows_are_cut_by_the_maximum_length_fails_no_check(tmp_path: Path) -> None:
    assert failed_checks(write_shard(tmp_path, clean_answers(60), max_length=100).audit()) == set()


@pytest.mark.parametrize("rows", [8, 16, 100, 1000])
def test_the_disaster_is_caught_in_a_shard_of_any_size(tmp_path: Path, rows: int) -> None:
    evidence = write_shard(tmp_path, disaster_answers(rows)).audit()
    assert {"mask_sum_mode_share", "empty_answer_share"} <= failed_checks(evidence)
    assert evidence["verdict"] == "fail"


def test_the_disaster_is_caught_where_the_parser_has_taken_the_empty_thought_away(
    tmp_path: Path,
) -> None:
    answers = [
        row | {"content": "OK."} if row["completion_tokens"] == 7 else row
        for row in disaster_answers(100)
    ]
    failed = failed_checks(write_shard(tmp_path, answers).audit())
    assert {"mask_sum_mode_share", "trivial_answer_share"} <= failed


def test_the_disaster_is_caught_among_truncated_answers(tmp_path: Path) -> None:
    answers = [*disaster_answers(50), *(make_truncated(f"t{i}") for i in range(50))]
    failed = failed_checks(write_shard(tmp_path, answers).audit(truncated_share=0.6))
    assert {"mask_sum_mode_share", "empty_answer_share"} <= failed


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[1:],
        lambda rows: [*rows, rows[-1]],
        lambda rows: [rows[1], rows[0], *rows[2:]],
        lambda rows: [*rows, make_answer("stranger")],
    ],
    ids=["lost", "repeated", "out of order", "not called for"],
)
def test_rows_that_are_not_those_that_the_prompts_call_for_are_caught(
    tmp_path: Path, change: Change
) -> None:
    shard = write_shard(tmp_path, clean_answers(20))
    rewrite(shard.generated, change)
    shard.tokenize()
    found = failed_checks(shard.audit())
    assert "unbalanced_rows" in found and found <= {"unbalanced_rows", "repeated_id_rows"}


def test_a_turn_of_a_conversation_that_is_missing_is_named(tmp_path: Path) -> None:
    shard = write_shard(
        tmp_path, [make_answer("talk", turn, tokens=60 + turn) for turn in range(3)]
    )
    rewrite(shard.generated, lambda rows: [rows[0], rows[2]])
    shard.tokenize()
    assert evidence_samples(shard.audit(), "unbalanced_rows") == ["talk_gen1"]


def test_a_turn_answered_twice_in_the_place_of_the_next_is_caught(tmp_path: Path) -> None:
    answers = [make_answer("talk", turn, tokens=60 + turn) for turn in range(3)]
    answers[2]["messages"] = answers[1]["messages"]
    assert failed_checks(write_shard(tmp_path, answers).audit()) == {"unbalanced_rows"}


def test_a_generation_after_a_tool_result_is_one_more_row_of_the_same_user_turn(
    tmp_path: Path,
) -> None:
    answers = tool_conversation()
    shard = write_shard(tmp_path, answers)
    write_prompts(shard.prompts, [row for row in answers if row["status"] != "tool_calls"])
    assert failed_checks(shard.audit()) == set()


def test_the_rows_that_conversations_really_unfold_into_balance(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    asked = {"role": "assistant", "content": "", "tool_calls": json.dumps([call])}
    told = {"role": "tool", "content": "noon", "tool_call_id": "c1"}
    prompt = {"prompt_id": "p", "source": "test", "tools": None}
    users = [ask("p", turn) for turn in range(4)]
    prompt["messages"] = [SYSTEM, users[0], asked, told, *users[1:]]  # type: ignore[assignment]
    called = {
        "status": "tool_calls",
        "finish_reason": "tool_calls",
        "tool_calls": json.dumps([call]),
    }
    cut = {"status": "truncated", "finish_reason": "length"}
    conversation, answers = begin_conversation(prompt, False), []
    for outcome in (called, {}, cut):
        length = 60 + conversation.turn
        row = make_answer("p", conversation.turn, tokens=length) | outcome
        row["messages"] = list(conversation.history)
        answers += [row, *conversation.accept(row)]
    assert [row["status"] for row in answers] == ["tool_calls", "ok", "truncated", *["skipped"] * 2]
    shard = write_shard(tmp_path, answers)
    write_prompts(shard.prompts, answers[1:])  # four user turns
    assert failed_checks(shard.audit()) == set()


def test_a_tool_call_without_a_result_ends_its_conversation_and_calls_for_no_more_rows(
    tmp_path: Path,
) -> None:
    called = tool_conversation()[0]
    ended = make_unanswered("tool", "skipped", "conversation_ended: the result is unknown")
    ended |= {"sample_id": "tool_gen1", "turn": 1, "messages": history("tool", 1)}
    assert failed_checks(write_shard(tmp_path, [called, ended]).audit()) == set()


def test_a_second_generation_without_a_tool_call_before_it_is_caught(tmp_path: Path) -> None:
    answers = tool_conversation()
    shard = write_shard(tmp_path, answers)
    write_prompts(shard.prompts, [row for row in answers if row["status"] != "tool_calls"])
    rewrite(shard.generated, first_row(status="ok"))
    shard.tokenize()
    assert failed_checks(shard.audit()) == {"unbalanced_rows"}


def test_answers_to_other_prompts_are_caught(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(20))
    rewrite(shard.generated, lambda rows: rows, prompts_sha256="prompts-2")
    assert failed_checks(shard.audit()) == {"unbalanced_rows"}


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [*rows[:3], *rows[4:]],
        lambda rows: [rows[0], *rows],
        lambda rows: [rows[1], rows[0], *rows[2:]],
        first_row(sample_id="stranger_gen0"),
    ],
    ids=["lost", "repeated", "out of order", "not generated"],
)
def test_tokenized_rows_that_are_not_the_generated_ones_are_caught(
    tmp_path: Path, change: Change
) -> None:
    shard = write_shard(tmp_path, clean_answers(20))
    rewrite(shard.tokenized, change)
    assert "unbalanced_rows" in failed_checks(shard.audit(dropped_share=1))


def test_an_answer_tokenized_although_it_was_given_up_is_caught(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(20))
    rewrite(shard.generated, first_row(status="error"))
    assert failed_checks(shard.audit()) == {"unbalanced_rows"}


def test_tokens_of_another_generation_of_the_same_prompts_are_caught(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(20))
    rewrite(shard.generated, lambda rows: rows, fingerprint="generated-2")
    assert failed_checks(shard.audit()) == {"unbalanced_rows"}


@pytest.mark.parametrize(
    "change",
    [
        first_row(seq_len=7),
        first_row(loss_tokens=7),
        first_row(loss_mask=[1]),
        lambda rows: first_row(input_ids=[-1, *rows[0]["input_ids"][1:]])(rows),
        lambda rows: first_row(loss_mask=[2, *rows[0]["loss_mask"][1:]])(rows),
        lambda rows: first_row(loss_mask=[*rows[0]["loss_mask"], 0])(rows),
        first_row(input_ids=None),
    ],
    ids=[
        "seq_len",
        "loss_tokens",
        "mask of another length",
        "negative id",
        "mask of 2",
        "longer mask",
        "null",
    ],
)
def test_a_row_that_contradicts_itself_is_caught_and_named(tmp_path: Path, change: Change) -> None:
    shard = write_shard(tmp_path, clean_answers(20))
    rewrite(shard.tokenized, change)
    evidence = shard.audit()
    assert "malformed_rows" in failed_checks(evidence)
    assert evidence_samples(evidence, "malformed_rows") == ["p0_gen0"]


def test_rows_longer_than_the_file_says_that_they_may_be_are_caught(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, [make_answer("a", tokens=100)])
    rewrite(shard.tokenized, lambda rows: rows, max_length="50")
    assert "malformed_rows" in failed_checks(shard.audit())


@pytest.mark.parametrize(
    ("change", "caught"),
    [
        (shifted_mask, {"usage_mismatch_rows"}),
        (mask_over_the_prompt, {"usage_mismatch_rows", "unprompted_rows"}),
        (mask_with_a_hole, {"usage_mismatch_rows", "scattered_mask_rows"}),
        (unsupervised_end, {"usage_mismatch_rows"}),
    ],
)
def test_a_mask_that_is_not_the_engines_is_caught(
    tmp_path: Path, change: Change, caught: set[str]
) -> None:
    shard = write_shard(tmp_path, clean_answers(20))
    rewrite(shard.tokenized, change)
    assert failed_checks(shard.audit()) == caught


@pytest.mark.parametrize("usage", ["completion_tokens", "prompt_tokens"])
def test_one_row_whose_tokens_are_not_those_that_the_engine_counted_is_caught_and_named(
    tmp_path: Path, usage: str
) -> None:
    answers = clean_answers(1000)
    answers[500][usage] += 1
    evidence = write_shard(tmp_path, answers).audit()
    assert failed_checks(evidence) == {"usage_mismatch_rows"}
    assert evidence_samples(evidence, "usage_mismatch_rows") == ["p500_gen0"]


def test_an_engine_that_does_not_report_usage_is_caught(tmp_path: Path) -> None:
    answers = [row | {"completion_tokens": None} for row in clean_answers(20)]
    assert failed_checks(write_shard(tmp_path, answers).audit()) == {"usage_mismatch_rows"}


def test_answers_of_one_length_are_caught_whatever_they_say(tmp_path: Path) -> None:
    answers = clean_answers(100)
    answers[:30] = [make_answer(f"p{i}", tokens=77) for i in range(30)]
    evidence = write_shard(tmp_path, answers).audit()
    assert failed_checks(evidence) == {"mask_sum_mode_share"}
    assert evidence["distribution"]["mask_sum"]["most_frequent"][0] == {"value": 77, "rows": 30}


@pytest.mark.parametrize(("equal", "rows"), [(2, 2), (3, 3), (3, 16), (6, 16), (4, 8)])
def test_a_few_answers_of_one_length_in_a_small_shard_are_chance(
    tmp_path: Path, equal: int, rows: int
) -> None:
    answers = clean_answers(rows)
    answers[:equal] = [make_answer(f"p{i}", tokens=77) for i in range(equal)]
    assert failed_checks(write_shard(tmp_path, answers).audit()) == set()


@pytest.mark.parametrize(("equal", "rows"), [(4, 4), (5, 8), (7, 16)])
def test_one_more_in_a_small_shard_is_no_longer_chance(
    tmp_path: Path, equal: int, rows: int
) -> None:
    answers = clean_answers(rows)
    answers[:equal] = [make_answer(f"p{i}", tokens=77) for i in range(equal)]
    assert failed_checks(write_shard(tmp_path, answers).audit()) == {"mask_sum_mode_share"}


def test_truncated_answers_count_as_truncated_and_not_as_answers_of_one_length(
    tmp_path: Path,
) -> None:
    answers = clean_answers(100)
    answers[:60] = [make_truncated(f"p{i}") for i in range(60)]
    shard = write_shard(tmp_path, answers)
    assert failed_checks(shard.audit()) == {"truncated_share"}
    assert failed_checks(shard.audit(truncated_share=0.6)) == set()


def test_answers_without_content_are_caught(tmp_path: Path) -> None:
    answers = [row | {"content": " \n"} for row in clean_answers(5)] + [
        make_answer(f"q{i}", tokens=row["completion_tokens"])
        for i, row in enumerate(clean_answers(95, seed=9))
    ]
    assert failed_checks(write_shard(tmp_path, answers).audit(empty_answer_share=0.04)) == set()
    answers[5:20] = [row | {"content": None, "reasoning": "Hm."} for row in answers[5:20]]
    assert failed_checks(write_shard(tmp_path, answers).audit()) == {"empty_answer_share"}


def test_answers_of_a_few_tokens_are_caught_whatever_their_lengths(tmp_path: Path) -> None:
    answers = clean_answers(100)
    answers[:30] = [make_answer(f"p{i}", tokens=3 + i % 10, content="No.") for i in range(30)]
    assert failed_checks(write_shard(tmp_path, answers).audit()) == {"trivial_answer_share"}


@pytest.mark.parametrize("status", ["error", "skipped"])
def test_many_rows_without_an_answer_are_caught_with_their_reason(
    tmp_path: Path, status: str
) -> None:
    answers = clean_answers(100)
    answers[:20] = [make_unanswered(f"p{i}", status, "HTTP 503") for i in range(20)]
    evidence = write_shard(tmp_path, answers).audit()
    assert failed_checks(evidence) == {f"{status}_share"}
    [check] = [check for check in evidence["checks"] if check["verdict"] == "fail"]
    assert check["evidence"][0] == {"sample_id": "p0_gen0", "seen": "HTTP 503"}


def test_turns_out_of_reach_have_a_limit_of_their_own_and_are_not_counted_as_skipped(
    tmp_path: Path,
) -> None:
    answers = clean_answers(80)
    for i in range(40):
        ended = make_unanswered(f"p{i}", "skipped", "conversation_ended: turn 0 is truncated")
        messages = history(f"p{i}", 1)
        row = ended | {"sample_id": f"p{i}_gen1", "turn": 1, "messages": messages}
        answers.insert(2 * i + 1, row)
    shard = write_shard(tmp_path, answers)
    assert failed_checks(shard.audit()) == {"unreached_share"}
    assert failed_checks(shard.audit(unreached_share=0.5)) == set()


def test_many_answers_that_leave_no_row_are_caught(tmp_path: Path) -> None:
    answers = clean_answers(100)
    answers[:20] = [make_answer(f"p{i}", prompt_token_ids=[1] * 5000) for i in range(20)]
    assert failed_checks(write_shard(tmp_path, answers).audit()) == {"dropped_share"}


def test_truncated_answers_left_out_on_request_are_not_lost(tmp_path: Path) -> None:
    answers = clean_answers(60)
    answers[:20] = [make_truncated(f"p{i}") for i in range(20)]
    shard = write_shard(tmp_path, answers, truncated="drop")
    assert failed_checks(shard.audit(truncated_share=0.5)) == set()


def test_a_shard_of_short_answers_is_caught_by_its_median(tmp_path: Path) -> None:
    answers = [make_answer(f"p{i}", tokens=15 + i % 16) for i in range(32)]
    evidence = write_shard(tmp_path, answers).audit()
    assert failed_checks(evidence) == {"median_loss_tokens", "short_answer_share"}
    limits = {"median_loss_tokens": 15, "short_answer_share": 1}
    assert failed_checks(write_shard(tmp_path, answers).audit(**limits)) == set()


def test_short_answers_in_a_small_shard_are_chance(tmp_path: Path) -> None:
    answers = [make_answer(f"p{i}", tokens=15 + 4 * i) for i in range(9)]
    assert failed_checks(write_shard(tmp_path, answers).audit()) == set()


def test_only_the_first_place_that_differs_is_named_as_out_of_order() -> None:
    assert compare_order(["a", "b", "c"], ["c", "a", "b"], "generated") == [
        ("c", "generated in the place of a")
    ]


def test_every_check_has_a_name_of_its_own_and_a_reason_of_one_sentence() -> None:
    checks = [*CHECKS, *SET_CHECKS]
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.why.endswith(".") and check.why.count(". ") == 0 for check in checks)


def test_a_check_names_at_most_ten_samples(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(30))
    write_generated(shard.generated, [])
    assert len(evidence_samples(shard.audit(), "unbalanced_rows")) == 10
