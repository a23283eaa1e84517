"""What one reply of the server is worth: the row's status, and the reason wherever it is not a plain answer.

HTTP 200 proves nothing: a reply counts only with a finish reason that is one, with the ids of prompt and response, with
a prompt that is the one we rendered, and with text that its own ids decode to. Thought and answer are parted where the
ids say; a server that parts them elsewhere does not know this model.
"""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from rebuild.tokens.chat import THINK_END, split_reasoning

Row = dict[str, Any]
ANSWERED = {"stop": "ok", "length": "truncated", "tool_calls": "tool_calls"}
CALL_START = "<tool_call>"  # Qwen's models may call a tool out of an open thought, which that ends
LARGEST_ID = np.iinfo(np.int32).max


class Rendered(NamedTuple):
    """What is kept of a rendered prompt in place of its ids: their number and digest, and what is open at its end.

    `refusal` says why the chat template refuses the conversation; then there are no ids.
    """

    length: int
    digest: bytes
    thought_open: bool
    offers_tools: bool = False
    refusal: str | None = None


class Parts(NamedTuple):
    """The ids of an answer without its stop id: its thought (None without one), and the rest (None if that never began)."""

    thought: list[int] | None
    rest: list[int] | None


@dataclass(frozen=True)
class Judge:
    """What is known of the model that a reply is held against; `without_ids` judges one without ids, None refuses it."""

    tokenizer: Any
    stop_ids: frozenset[int]
    think_start_id: int | None
    think_end_id: int | None
    without_ids: Callable[[Row, Rendered], Row] | None = None

    def outcome(
        self, reply: dict[str, Any], rendered: Rendered, render_again: Callable[[], list[int]]
    ) -> Row:
        """Return the part of a row that a reply decides: ids, texts, counts, status, and error if any."""
        try:
            fields = reply_fields(reply)
        except (KeyError, IndexError, TypeError) as error:
            return failed(f"malformed_reply: {type(error).__name__}: {error}")
        if self.without_ids and not fields["prompt_token_ids"] + fields["response_token_ids"]:
            return fields | self.without_ids(fields, rendered)
        said = self.decode(said_ids(fields))
        fault = self.fault(fields, said, rendered, render_again)
        if fault:
            return fields | failed(fault)
        parts = self.parts(fields, rendered.thought_open)
        if self.parted_elsewhere(fields, parts):
            return fields | failed("thought: the server ends it elsewhere than the ids do")
        return fields | self.texts(fields, said, parts) | {"error": None}

    def fault(
        self, fields: Row, said: str, rendered: Rendered, render_again: Callable[[], list[int]]
    ) -> str | None:
        """Return what disqualifies a reply whose ids decode to `said`, or None."""
        finish, ids = fields["finish_reason"], fields["response_token_ids"]
        if finish not in ANSWERED:
            return f"finish_reason: {finish!r} is no answer"
        if not fields["prompt_token_ids"] or not ids:
            return "no_ids: the reply holds no token ids of prompt or response"
        if digest(fields["prompt_token_ids"]) != rendered.digest:
            return "prompt_ids: " + first_difference(render_again(), fields["prompt_token_ids"])
        if fields["completion_tokens"] != len(ids):
            return f"token_count: usage says {fields['completion_tokens']}, {len(ids)} ids came"
        if finish != "length" and ids[-1] not in self.stop_ids:
            return f"no_stop_id: finish_reason {finish} but the last id is {ids[-1]}"
        if finish == "tool_calls" and not fields["tool_calls"]:
            return "no_calls: finish_reason tool_calls, but no call came"
        if not decodes_to(said, fields, rendered.offers_tools):
            return "text: the ids do not decode to the text that came with them"
        return None

    def parts(self, fields: Row, thought_open: bool) -> Parts:
        """Return an answer's parts: its thought ends at the first `</think>`, or, where there is none, at a tool call."""
        ids = said_ids(fields)
        if not thought_open:
            if ids[:1] != [self.think_start_id]:
                return Parts(None, ids)
            ids = ids[1:]
        closed = split_reasoning(ids, self.think_end_id)
        if closed is not None:
            return Parts(*closed)
        ahead = self.ahead_of_call(ids)
        if fields["finish_reason"] == "tool_calls" and len(ahead) < len(ids):
            return Parts(ahead, ids[len(ahead) :])
        return Parts(ids, None)

    def ahead_of_call(self, ids: list[int]) -> list[int]:
        """Return the ids before the first that opens a tool call, all where none does."""
        call = self.tokenizer.get_added_vocab().get(CALL_START)
        return ids[: ids.index(call)] if call in ids else ids

    def parted_elsewhere(self, fields: Row, parts: Parts) -> bool:
        """Whether the server's reasoning parser, if one is at work, took something else for the thought."""
        if parts.thought is None or fields["reasoning"] is None:
            return False
        thought = parts.thought if parts.rest is not None else self.ahead_of_call(parts.thought)
        return essence(fields["reasoning"]) != essence(self.decode(thought))

    def texts(self, fields: Row, said: str, parts: Parts) -> Row:
        """Return reasoning and content, both without the white space between them, the thought's tokens, and the status.

        A thought that never ends is a truncated answer, whatever the finish reason says.
        """
        status = ANSWERED[fields["finish_reason"]]
        called = status == "tool_calls"
        thought = parts.thought or []
        if parts.rest is None:
            status, content = "truncated", ""
        elif called:
            content = fields["content"] or ""
            if parts.thought is not None and fields["reasoning"] is None:
                # without a reasoning parser the server leaves the thought in the text
                content = content.partition(THINK_END)[2]
        else:
            content = said if parts.thought is None else self.decode(parts.rest)
        if parts.thought is not None:
            content = content.strip()
        return {
            "status": status,
            "reasoning": None if parts.thought is None else self.decode(thought).strip(),
            "content": content,
            "tool_calls": fields["tool_calls"] if called else None,
            "reasoning_tokens": len(thought),
        }

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def thought_open(self, prompt_ids: list[int]) -> bool:
        """Whether the rendered prompt ends with an opened thought, as thinking templates leave it."""
        if self.think_start_id not in prompt_ids:
            return False
        after = len(prompt_ids) - prompt_ids[::-1].index(self.think_start_id)
        return not self.tokenizer.decode(prompt_ids[after:]).strip()


def decodes_to(said: str, fields: Row, offers_tools: bool) -> bool:
    """Whether the decoded ids are reasoning plus content (white space and a cut last character apart).

    Where tools were offered the server leaves calls out of the text, whole ones and the beginning of one.
    """
    decoded = essence(said)
    served = essence((fields["reasoning"] or "") + (fields["content"] or ""))
    if not offers_tools:
        return decoded == served
    calls = json.loads(fields["tool_calls"] or "[]")
    named = all(essence(call["function"]["name"]) in decoded for call in calls)
    return decoded.startswith(served) and named


def rendered_prompt(ids: list[int], judge: Judge, offers_tools: bool) -> Rendered:
    """Return what is kept of a rendered prompt until its reply comes."""
    return Rendered(len(ids), digest(ids), judge.thought_open(ids), offers_tools)


def digest(ids: list[int]) -> bytes:
    """Return 16 bytes that identify a list of token ids."""
    return sha256(np.asarray(ids, dtype=np.int32).tobytes()).digest()[:16]


def reply_fields(reply: Row) -> Row:
    """Return what a reply says, under the names of the generated table.

    Raises:
        KeyError, IndexError, TypeError: it is not a chat completion.
    """
    choice = expect(dict, reply["choices"][0])
    message = expect(dict, choice["message"])
    usage = expect(dict, reply.get("usage") or {})
    calls = message.get("tool_calls") or []
    for call in calls:
        expect(str, call["id"]), expect(str, call["function"]["name"])
    return {
        "prompt_token_ids": expect_ids(choice.get("prompt_token_ids")),
        "response_token_ids": expect_ids(choice.get("response_token_ids")),
        "reasoning": expect(str | None, message.get("reasoning_content")),
        "content": expect(str | None, message.get("content")),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "finish_reason": expect(str | None, choice.get("finish_reason")),
        "prompt_tokens": expect(int | None, usage.get("prompt_tokens")),
        "completion_tokens": expect(int | None, usage.get("completion_tokens")),
        "response_logprobs": sampled_logprobs(choice),
    }


def expect(kind: Any, value: Any) -> Any:
    """Return `value`, which must be of a type or union of types.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{kind} expected, seen {value!r:.100}")
    return value


def expect_ids(value: Any) -> list[int]:
    """Return token ids, an empty list for none.

    Raises:
        TypeError: it is something else than a list of ids that fit into int32.
    """
    ids: list[int] = expect(list, value or [])
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > LARGEST_ID):
        raise TypeError("token ids are not whole numbers of 31 bits")
    return ids


def said_ids(fields: Row) -> list[int]:
    """Return the response without the stop id, which the server leaves out of the text."""
    ids: list[int] = fields["response_token_ids"]
    return ids if fields["finish_reason"] == "length" else ids[:-1]


def sampled_logprobs(choice: Row) -> list[float] | None:
    """Return the log-probability of every sampled token where it was asked for.

    Raises:
        KeyError, TypeError: they are not in the place that OpenAI's format has for them.
    """
    content = expect(dict, choice.get("logprobs") or {}).get("content")
    return [entry["logprob"] for entry in content] if content else None


def failed(reason: str) -> Row:
    """Return the fields of an error row."""
    return {"status": "error", "error": reason}


def first_difference(expected: list[int], seen: list[int]) -> str:
    """Say where two id lists part."""
    shared = min(len(expected), len(seen))
    differing = np.nonzero(np.array(expected[:shared]) != np.array(seen[:shared]))[0]
    at = int(differing[0]) if len(differing) else shared
    return (
        f"the server rendered {len(seen)} ids, we {len(expected)}; first difference at {at}: "
        f"{seen[at : at + 3]} instead of {expected[at : at + 3]}"
    )


def essence(text: str) -> str:
    """Return text as far as a parser and an incremental detokenizer keep it: NFC, no white space, no cut characters."""
    kept = text.replace("<think>", "").replace("</think>", "").replace("�", "")
    return "".join(unicodedata.normalize("NFC", kept).split())
