"""How a prompt unfolds into generations: one row per answer, each on the model's own earlier answers.

Turn k of a prompt is its k-th generation. Its history is all that came before: the source's system and user messages,
the model's own answers, and tool results, but these only where the source holds the result of the very call that the
model made. No answer and no result is taken over or invented.
"""

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from rebuild.tables import GENERATED

Message = dict[str, Any]
Row = dict[str, Any]

ENDS_CONVERSATION = {"truncated", "error", "skipped"}


@dataclass
class Conversation:
    """One prompt on its way through its turns; `waiting` holds the user messages that are still to be answered."""

    prompt_id: str
    source: str
    tools: str | None
    waiting: list[Message]
    recorded: list[list[Message]]
    keep_reasoning: bool
    history: list[Message] = field(default_factory=list)
    turn: int = 0

    @property
    def finished(self) -> bool:
        """Whether nothing is left to be asked."""
        return not self.waiting

    def skeleton(self) -> Row:
        """Return the next generation's row with all that is known before it is asked for."""
        return dict.fromkeys(GENERATED.names) | {
            "sample_id": f"{self.prompt_id}_gen{self.turn}",
            "prompt_id": self.prompt_id,
            "turn": self.turn,
            "source": self.source,
            "messages": list(self.history),
            "tools": self.tools,
            "prompt_token_ids": [],
            "response_token_ids": [],
        }

    def accept(self, row: Row) -> list[Row]:
        """Go on after `row`, the outcome of the next generation; return rows for the turns that it puts out of reach."""
        self.turn += 1
        if row["status"] in ENDS_CONVERSATION:
            return self._give_up(f"turn {row['turn']} is {row['status']}")
        self.history.append(answer_message(row))
        if row["status"] != "tool_calls":
            self._next_user()
            return []
        results = self._take_results(row)
        self.history += results
        return (
            [] if results else self._give_up(f"the result of turn {row['turn']}'s call is unknown")
        )

    def _next_user(self) -> None:
        """Turn to the next user message, and leave the thoughts of the turns before it behind."""
        self.waiting.pop(0)
        self.recorded.pop(0)
        if not self.keep_reasoning:
            self.history = [message | {"reasoning_content": None} for message in self.history]
        if self.waiting:
            self.history.append(self.waiting[0])

    def _give_up(self, reason: str) -> list[Row]:
        rows = []
        self._next_user()
        while not self.finished:
            rows.append(
                self.skeleton() | {"status": "skipped", "error": f"conversation_ended: {reason}"}
            )
            self.turn += 1
            self._next_user()
        return rows

    def _take_results(self, row: Row) -> list[Message]:
        """Return the recorded results of exactly the calls in `row`, under the row's call ids; each is used once."""
        calls = json.loads(row["tool_calls"])
        recorded = self.recorded[0]
        for start, message in enumerate(recorded):
            results = following_results(recorded, start)
            if not same_calls(message, calls) or len(results) != len(calls):
                continue
            del recorded[start : start + 1 + len(results)]
            return [
                result | {"tool_call_id": call["id"]}
                for result, call in zip(in_call_order(results, message), calls, strict=True)
            ]
        return []


def begin_conversation(prompt: Row, keep_reasoning: bool) -> Conversation:
    """Return the conversation of one row of the prompts table, at its first turn.

    `keep_reasoning` puts the thoughts of earlier answers into the history (`generate.history_reasoning: preserve`).
    """
    opening: list[Message] = []
    waiting: list[Message] = []
    recorded: list[list[Message]] = []
    for message in prompt["messages"]:
        if message["role"] == "user":
            waiting.append(message)
            recorded.append([])
        elif waiting:
            recorded[-1].append(message)
        else:
            opening.append(message)
    history = [*opening, *waiting[:1]]
    return Conversation(
        prompt["prompt_id"],
        prompt["source"],
        prompt["tools"],
        waiting,
        recorded,
        keep_reasoning,
        history,
    )


def replay(prompt: Row, logged: list[Row], keep_reasoning: bool) -> tuple[Conversation, list[Row]]:
    """Return the conversation after the logged outcomes (by turn), and all its rows so far, those out of reach included."""
    conversation = begin_conversation(prompt, keep_reasoning)
    rows: list[Row] = []
    for row in logged:
        if conversation.finished or row["turn"] != conversation.turn:
            break
        rows.append(row)
        rows += conversation.accept(row)
    return conversation, rows


def answer_message(row: Row) -> Message:
    """Return an answer as a message of the history."""
    return {
        "role": "assistant",
        "content": row["content"],
        "reasoning_content": row["reasoning"],
        "tool_calls": row["tool_calls"],
        "tool_call_id": None,
        "name": None,
    }


def same_calls(message: Message, calls: list[dict[str, Any]]) -> bool:
    """Whether a recorded assistant message made exactly these calls: same names and arguments, in the same order."""
    if message["role"] != "assistant" or not message["tool_calls"]:
        return False
    return [*map(call_identity, json.loads(message["tool_calls"]))] == [*map(call_identity, calls)]


def call_identity(call: dict[str, Any]) -> tuple[str, Any]:
    """Return what makes two tool calls the same: the function's name and its arguments as values."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # two calls with the same broken text are still the same
        with contextlib.suppress(json.JSONDecodeError):
            arguments = json.loads(arguments)
    return function["name"], arguments


def following_results(messages: list[Message], start: int) -> list[Message]:
    """Return the tool messages right after position `start`."""
    results = []
    for message in messages[start + 1 :]:
        if message["role"] != "tool":
            break
        results.append(message)
    return results


def in_call_order(results: list[Message], message: Message) -> list[Message]:
    """Return the results of a message's calls in the order of the calls, which is how templates without ids show them.

    A result belongs to the call whose id it has; without one, to the first call that is left.
    """
    left = list(results)
    ordered = []
    for call in json.loads(message["tool_calls"]):
        named = [n for n, result in enumerate(left) if result["tool_call_id"] == call.get("id")]
        ordered.append(left.pop(named[0] if named else 0))
    return ordered
