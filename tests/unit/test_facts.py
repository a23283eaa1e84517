"""The facts about rows that the checks look at."""

import pytest

from rebuild.audit.facts import HANDFUL, answer_kind, split_thought

LONG = 100


@pytest.mark.parametrize(
    ("reasoning", "content", "tokens", "kind"),
    [
        (None, "Bread rises because of yeast.", LONG, "said"),
        (None, "Yes.", 3, "trivial"),
        (None, "", 1, "empty"),
        (None, None, 1, "empty"),
        (None, " \n\u3000", LONG, "empty"),
        ("A long thought.", "4", LONG, "said"),
        ("Short.", "4", 8, "said"),
        ("A long thought.", "", LONG, "empty"),
        ("A long thought.", None, LONG, "empty"),
        ("\n\n", "OK.", 7, "empty"),
        ("", "OK.", 7, "empty"),
        ("", "A full answer.", LONG, "said"),
        (None, "<think>\n\n</think>\n\nOK.", 7, "empty"),
        (None, "\n\n</think>\n\nOK.", 6, "empty"),
        (None, "<think>\n\n</think>\n\nA full answer.", LONG, "said"),
        (None, "<think>\nHm.\n</think>\n\n", LONG, "empty"),
        (None, "<think>\nHm, and no end", LONG, "empty"),
        (None, "Hm.\n</think>\n\nA full answer.", LONG, "said"),
    ],
)
def test_an_answer_is_judged_by_what_it_says_after_its_thought(
    reasoning: str | None, content: str | None, tokens: int, kind: str
) -> None:
    assert answer_kind("ok", reasoning, content, None, tokens) == kind


def test_a_tool_call_says_something_even_without_text() -> None:
    assert answer_kind("tool_calls", None, "", '[{"name": "f"}]', 9) == "said"
    assert answer_kind("ok", None, "", "[]", 9) == "empty"


@pytest.mark.parametrize("status", ["truncated", "skipped", "error"])
def test_an_answer_that_did_not_finish_is_not_judged(status: str) -> None:
    assert answer_kind(status, "still thinking", "", None, LONG) == ""


def test_a_handful_of_tokens_is_the_last_length_that_is_trivial() -> None:
    assert answer_kind("ok", None, "word", None, HANDFUL) == "trivial"
    assert answer_kind("ok", None, "word", None, HANDFUL + 1) == "said"


def test_an_answer_of_unknown_length_is_not_taken_for_short() -> None:
    assert answer_kind("ok", None, "word", None, -1) == "said"


def test_thought_and_answer_are_told_apart_wherever_the_parser_left_them() -> None:
    assert split_thought("thought", "answer") == ("thought", "answer")
    assert split_thought(None, "<think>thought</think>answer") == ("thought", "answer")
    assert split_thought(None, "answer") == (None, "answer")
    assert split_thought("", "answer") == ("", "answer")
