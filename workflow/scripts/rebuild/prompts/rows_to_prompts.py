"""From one row of a source to one prompt: its id, its columns, its hashes."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import orjson

from rebuild.prompts.messages import (
    conversation_entries,
    first_given,
    functions_json,
    kept_messages,
    to_json,
)
from rebuild.prompts.refusal import Refusal

MAX_CHARS = 1_000_000  # of one prompt, all its messages and tools together
MAX_ID_CHARS = 200

ID_COLUMNS = ("prompt_id", "id", "conversation_id", "question_id")
FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
TEXTS = ("content", "tool_calls")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

Prompt = dict[str, Any]


def given_id(row: dict[str, Any]) -> str | None:
    """Return the row's own id, the first one given of `ID_COLUMNS`, or None.

    Raises:
        Refusal: bad_id.
    """
    column = first_given(row, ID_COLUMNS)
    if column is None:
        return None
    value = row[column]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise Refusal("bad_id", f"{column} is of type {type(value).__name__}")
    if not 1 <= len(value) <= MAX_ID_CHARS:
        raise Refusal("bad_id", f"{column} has {len(value)} characters")
    if CONTROL.search(value):
        raise Refusal("bad_id", f"{column} holds a control character")
    return value


def to_prompt(row: dict[str, Any], origin: str, max_chars: int = MAX_CHARS) -> Prompt:
    """Return the row as a prompt with the columns of `tables.PROMPTS`.

    Assistant messages are dropped, for they are what is generated anew; only one with tool calls
    whose results follow stays, without its text, as the evidence of those results. Without an id
    the prompt gets the first 16 hex digits of its `conversation_digest`; without a source, `origin`.

    Raises:
        Refusal: any reason of `REASONS` but the duplicates and those of `prompt_rows.parse_row`.
    """
    prompt_id = given_id(row)
    column, entries = conversation_entries(row)
    messages = kept_messages(entries)
    tools = functions_json(row.get("tools"), "tools")
    chars = count_chars({"messages": messages, "tools": tools})
    if chars > max_chars:
        raise Refusal("too_long", f"{chars} characters, the limit is {max_chars}")
    source = row.get("source") or origin
    named = isinstance(source, str)
    used = {column, "tools", first_given(row, ID_COLUMNS), "source" if named else None}
    extra = {key: value for key, value in row.items() if key not in used}
    prompt = {
        "prompt_id": prompt_id,
        "source": source if named else origin,
        "messages": [{field: message.get(field) for field in FIELDS} for message in messages],
        "tools": tools,
        "extra": to_json(extra) if extra else None,
    }
    if prompt_id is None:
        prompt["prompt_id"] = conversation_digest(prompt).hex()[:16]
    return prompt


def conversation_digest(prompt: Prompt) -> bytes:
    """Return the SHA-256 of the prompt's messages (fields that are null left out) and tools as canonical JSON."""
    messages = [
        {field: value for field, value in message.items() if value is not None}
        for message in prompt["messages"]
    ]
    return hashlib.sha256(canonical({"messages": messages, "tools": prompt["tools"]})).digest()


def canonical(value: Any) -> bytes:
    """Return `value` as JSON with sorted keys and no spaces, in UTF-8."""
    return bytes(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))


def content_hash(prompts: Iterable[Prompt]) -> str:
    """Return the hex SHA-256 over the prompts' canonical JSON, one a line: a shard's `content_sha256`.

    It is the same whatever wrote the Parquet file, so rows read back with `iter_rows` verify it.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(canonical(prompt) + b"\n")
    return digest.hexdigest()


def count_user_turns(prompt: Prompt) -> int:
    """Return how many answers the prompt asks for: one for each user message."""
    return sum(message["role"] == "user" for message in prompt["messages"])


def count_chars(prompt: Prompt) -> int:
    """Return the characters of the prompt's messages, their tool calls, and its tools."""
    texts = [message.get(field) for message in prompt["messages"] for field in TEXTS]
    return sum(len(text) for text in [*texts, prompt["tools"]] if text)
