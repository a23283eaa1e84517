"""What one reply of the server is worth: the row's status, and the reason wherever it is not a plain answer.

HTTP 200 proves nothing: a reply counts only with a finish reason that is one, with the ids of prompt and response, with
a prompt that is the one we rendered, and with text that its own ids decode to.
"""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from rebuild.chat import split_reasoning

Row = dict[str, Any]
ANSWERED = {"stop": "ok", "length": "truncated", "tool_calls": "tool_calls"}


class Rendered(NamedTuple):
    """What identifies a rendered prompt without its ids: their number, their digest, and whether a thought is open.

    `refusal` says why the chat template refuses the conversation; then there are no ids.
    """

    length: int
    digest: bytes
    thought_open: bool
    refusal: str | None = None


@dataclass(frozen=True)
class Judge:
    """What is known of the model that a reply is held against."""

    tokenizer: Any
    stop_ids: frozenset[int]
    think_start_id: int | None
    think_end_id: int | None

    def outcome(
        self, reply: dict[str, Any], rendered: Rendered, render_again: Callable[[], list[int]]
    ) -> Row:
        """Return the part of a row that a reply decides: ids, texts, counts, status, and error if any."""
        try:
            choice = reply["choices"][0]
            message = choice["message"]
            fields = reply_fields(reply, choice, message)
        except (KeyError, IndexError, TypeError) as error:
            return failed(f"malformed_reply: {type(error).__name__}: {error}")
        fault = self.fault(fields, rendered, render_again)
        if fault:
            return fields | failed(fault)
        return fields | self.texts(fields, rendered.thought_open) | {"error": None}

    def fault(
        self, fields: Row, rendered: Rendered, render_again: Callable[[], list[int]]
    ) -> str | None:
        """Return what disqualifies a reply, or None."""
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
        if not self.decodes_to(ids, fields):
            return "text: the ids do not decode to the text that came with them"
        return None

    def decodes_to(self, ids: list[int], fields: Row) -> bool:
        """Whether the ids decode to reasoning plus content (white space and a cut last character apart)."""
        decoded = self.tokenizer.decode(ids, skip_special_tokens=True)
        served = (fields["reasoning"] or "") + (fields["content"] or "")
        if fields["tool_calls"]:
            return essence(decoded).startswith(essence(served))
        return essence(decoded) == essence(served)

    def texts(self, fields: Row, thought_open: bool) -> Row:
        """Return reasoning, content, its token count and the status, the thought split from the ids themselves."""
        status = ANSWERED[fields["finish_reason"]]
        ids = fields["response_token_ids"]
        if not thought_open:
            return {"status": status, "reasoning_tokens": 0}
        thought = split_reasoning(ids, self.think_end_id)
        if thought is None:
            whole = (fields["reasoning"] or "") + (fields["content"] or "")
            return {
                "status": "truncated",
                "reasoning": whole,
                "content": "",
                "reasoning_tokens": len(ids),
            }
        reasoning = self.tokenizer.decode(thought[0], skip_special_tokens=True).strip()
        content = fields["content"] or ""
        if fields["reasoning"] is None:  # the server runs without a reasoning parser
            content = self.tokenizer.decode(thought[1], skip_special_tokens=True).strip()
        return {
            "status": status,
            "reasoning": reasoning,
            "content": content,
            "reasoning_tokens": len(thought[0]),
        }

    def thought_open(self, prompt_ids: list[int]) -> bool:
        """Whether the rendered prompt ends inside a thought, as thinking templates leave it."""
        if self.think_start_id is None:
            return False
        for token in reversed(prompt_ids):
            if token == self.think_end_id:
                return False
            if token == self.think_start_id:
                return True
        return False


def rendered_prompt(ids: list[int], judge: Judge) -> Rendered:
    """Return what is kept of a rendered prompt until its reply comes."""
    return Rendered(len(ids), digest(ids), judge.thought_open(ids))


def digest(ids: list[int]) -> bytes:
    """Return 16 bytes that identify a list of token ids."""
    return sha256(np.asarray(ids, dtype=np.int32).tobytes()).digest()[:16]


def reply_fields(reply: Row, choice: Row, message: Row) -> Row:
    """Return what a reply says, under the names of the generated table."""
    usage = reply.get("usage") or {}
    calls = message.get("tool_calls")
    return {
        "prompt_token_ids": choice.get("prompt_token_ids") or [],
        "response_token_ids": choice.get("response_token_ids") or [],
        "reasoning": message.get("reasoning_content"),
        "content": message.get("content"),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "response_logprobs": sampled_logprobs(choice),
    }


def sampled_logprobs(choice: Row) -> list[float] | None:
    """Return the log-probability of every sampled token where it was asked for."""
    content = (choice.get("logprobs") or {}).get("content")
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
