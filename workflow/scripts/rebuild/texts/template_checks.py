"""Whether a chat template wrote an answer as it was: what may differ, what may not, and the reason where it does."""

import json
from collections.abc import Iterator
from typing import Any

from rebuild.tokens.chat import THINK_END, THINK_START

Row = dict[str, Any]

REASONS = {
    "unrenderable": "the chat template or the server refuses the conversation",
    "history_rewritten": "the rendering with the answer does not begin with that of the prompt",
    "no_end_marker": "the template does not end the answer with a token that the model stops at",
    "empty_think": "the template writes an empty think block that the answer never saw",
    "thought_changed": "the template leaves out, cuts or changes the thought",
    "content_changed": "the template cuts, changes or adds to the answer's text",
    "calls_changed": "the template leaves out or changes the tool calls",
    "unclosed_thought": "the answer stopped inside its thought, which the template closes",
    "cut_character": "the answer holds U+FFFD: bytes that it was made of are lost",
    "special_token": "the answer spells out a special token, which tokenizing would make one",
    "not_reversible": "the ids do not decode to the text that they were made of",
}
ENDED = ("stop", "tool_calls")
CUT_CHARACTER = "\ufffd"
SHOWN = 60


class UnstableError(ValueError):
    """The template does not render this answer as it was: `reason`, a key of `REASONS`, and `detail`, what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def check_said(row: Row, special: frozenset[str]) -> None:
    """Refuse texts that cannot be what was sampled: with lost bytes, or with special tokens spelled out.

    Raises:
        UnstableError: names what was found.
    """
    called = leaves(plain_calls(json.loads(row["tool_calls"] or "[]")))
    texts = [row["reasoning"] or "", row["content"] or "", *map(str, called)]
    for text in texts:
        if CUT_CHARACTER in text:
            raise UnstableError("cut_character", around(text, text.index(CUT_CHARACTER)))
        spelled = next((token for token in special if token in text), None)
        if spelled:
            raise UnstableError(
                "special_token", f"{spelled} in {around(text, text.index(spelled))}"
            )


def said_text(body: str, row: Row, *, thought_open: bool) -> str:
    """Return what the answer said, without tool calls and stop token, as the template writes it in `body`.

    Of an answer that was cut inside its thought that is the thought alone.

    Raises:
        UnstableError: the template writes something else than thought and content.
    """
    thought, content = row["reasoning"], row["content"] or ""
    if thought is None:
        if body != content:
            raise change_of(body, content)
        return body
    if not body.endswith(content):
        raise UnstableError("content_changed", first_difference(content, body[-len(content) :]))
    lead, marker, after = body[: len(body) - len(content)].rpartition(THINK_END)
    written = lead if thought_open else lead.removeprefix(THINK_START)
    opened = thought_open or written != lead
    same = thought in written and written.strip() == thought.strip() and THINK_END not in thought
    if not marker or after.strip() or not opened or not same:
        raise UnstableError("thought_changed", f"{body[:SHOWN]!r} for {thought[:SHOWN]!r}")
    if row["finish_reason"] == "length":
        return body if content else lead.rstrip()
    if row["status"] == "truncated":
        raise UnstableError("unclosed_thought", repr(thought[-SHOWN:]))
    return body


def change_of(body: str, content: str) -> UnstableError:
    """Return what the template did to an answer without a thought."""
    opening, marker, after = body.partition(THINK_END)
    if marker and opening.strip() in ("", THINK_START) and after.strip() == content.strip():
        return UnstableError("empty_think", repr(body[: len(body) - len(after)]))
    return UnstableError("content_changed", first_difference(content, body))


def check_calls(body: str, plain: str, calls: list[dict[str, Any]]) -> None:
    """Refuse a rendering of tool calls that does not follow the text and hold all names and arguments, in order.

    Raises:
        UnstableError: names what is missing.
    """
    if not body.startswith(plain):
        raise UnstableError("calls_changed", first_difference(plain, body))
    place = len(plain)
    for part in leaves(plain_calls(calls)):
        found = [(body.find(text, place), len(text)) for text in spellings(part)]
        place = min((start + length for start, length in found if start >= 0), default=-1)
        if place < 0:
            raise UnstableError("calls_changed", f"{part!r:.{SHOWN}} is missing or elsewhere")


def plain_calls(calls: list[dict[str, Any]]) -> list[Any]:
    """Return the names and arguments of tool calls as values; a name comes first."""
    functions = [call["function"] for call in calls]
    given = [function.get("arguments") for function in functions]
    values = [json.loads(text) if isinstance(text, str) else text for text in given]
    return [[function["name"], value] for function, value in zip(functions, values, strict=True)]


def leaves(value: Any) -> Iterator[Any]:
    """Yield all keys and plain values of a JSON value, in their order."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def spellings(value: Any) -> set[str]:
    """Return how a template may write a plain value: as it is, or as JSON."""
    return {str(value), json.dumps(value), json.dumps(value, ensure_ascii=False)}


def first_difference(expected: str, seen: str) -> str:
    """Say where two texts part."""
    pairs = enumerate(zip(expected, seen, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(expected), len(seen)))
    return f"{around(seen, at)} instead of {around(expected, at)} at character {at}"


def around(text: str, at: int) -> str:
    """Return the text at a position, with a little of what precedes it."""
    return repr(text[max(at - SHOWN // 4, 0) : at + SHOWN])
