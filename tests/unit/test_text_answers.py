"""What becomes of replies that came as text alone: an answer where the text tells all, an error where it does not."""

from functools import partial
from typing import Any

import pytest

from rebuild.generate.answers import Judge, Rendered
from rebuild.generate.text_answers import text_outcome

OPEN, CLOSED = Rendered(9, b"", True), Rendered(9, b"", False)
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def reply(content: str | None, reasoning: str | None = None, **changes: Any) -> dict[str, Any]:
    """Return a chat completion without ids; `changes` replace fields of the choice, its message or the usage."""
    message = {"content": content, "reasoning_content": reasoning, "tool_calls": None}
    choice = {"message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    for place in (choice, message, usage):
        place.update({key: changes[key] for key in changes if key in place})
    return {"choices": [choice], "usage": usage}


def judged(given: dict[str, Any], rendered: Rendered, thinks: bool = True) -> dict[str, Any]:
    without_ids = partial(text_outcome, thinks=thinks)
    return Judge(None, frozenset(), None, None, without_ids).outcome(given, rendered, list)


def texts(row: dict[str, Any]) -> tuple[str, str | None, str]:
    assert row["error"] is None
    assert row["prompt_token_ids"] == row["response_token_ids"] == []
    return row["status"], row["reasoning"], row["content"]


@pytest.mark.parametrize(("finish", "status"), [("stop", "ok"), ("length", "truncated")])
def test_an_answer_without_a_thought_is_kept_as_it_came(finish: str, status: str) -> None:
    row = judged(reply("\n Blue.\n", finish_reason=finish), CLOSED)
    assert texts(row) == (status, None, "\n Blue.\n")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (9, 5)


@pytest.mark.parametrize("rendered", [OPEN, CLOSED])
def test_where_the_server_holds_the_thought_apart_its_word_counts(rendered: Rendered) -> None:
    row = judged(reply("\n\nIt is </think> here.", "So.\n"), rendered)
    assert texts(row) == ("ok", "So.", "It is </think> here.")


@pytest.mark.parametrize(
    ("content", "rendered"),
    [
        ("So.\n</think>\n\nBlue </think>.", OPEN),
        ("<think>\nSo.\n</think>\n\nBlue </think>.", OPEN),
        ("<think>\nSo.\n</think>\n\nBlue </think>.", CLOSED),
    ],
)
def test_elsewhere_a_thought_ends_at_its_first_end_marker(content: str, rendered: Rendered) -> None:
    assert texts(judged(reply(content), rendered)) == ("ok", "So.", "Blue </think>.")


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(
    ("content", "reasoning"), [("", "Let me see"), (None, "Let me see"), ("<think>Let me see", None)]
)  # fmt: skip
def test_a_reply_that_only_thinks_is_truncated_whatever_its_finish_reason(
    content: str | None, reasoning: str | None, finish: str
) -> None:
    row = judged(reply(content, reasoning, finish_reason=finish), CLOSED)
    assert texts(row) == ("truncated", "Let me see", "")


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_text_that_may_be_a_thought_or_an_answer_is_an_error(finish: str) -> None:
    row = judged(reply("Let me see", finish_reason=finish), OPEN)
    assert row["status"] == "error"
    assert row["error"].startswith("thought: ") and "reasoning parser" in row["error"]


def test_markers_are_plain_text_where_the_model_has_none() -> None:
    said = "<think> is </think> a marker"
    assert texts(judged(reply(said), CLOSED, thinks=False)) == ("ok", None, said)


def test_a_tool_call_needs_no_text_beside_it() -> None:
    called = judged(reply(None, "So.", finish_reason="tool_calls", tool_calls=[CALL]), OPEN)
    assert texts(called) == ("tool_calls", "So.", "")
    assert '"name": "f"' in called["tool_calls"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish_reason": "abort"}, "finish_reason: 'abort'"),
        ({"finish_reason": None}, "finish_reason: None"),
        ({"finish_reason": "tool_calls"}, "no_calls: "),
        ({"prompt_tokens": 10}, "prompt_tokens: the server counts 10, we 9"),
        ({"tool_calls": [{"id": "call_0"}]}, "malformed_reply: "),
    ],
)
def test_a_faulty_reply_is_an_error_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    row = judged(reply("Blue.", **changes), CLOSED)
    assert row["status"] == "error" and row["error"].startswith(reason)


def test_a_server_that_counts_nothing_is_believed() -> None:
    nothing = reply("Blue.", prompt_tokens=None, completion_tokens=None)
    assert texts(judged(nothing, CLOSED)) == ("ok", None, "Blue.")
    assert judged(nothing, CLOSED)["completion_tokens"] is None
