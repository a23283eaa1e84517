"""The conversation of a row, in any of the shapes that are understood: which messages stay, and the tools."""

from typing import Any

import orjson

from rebuild.prompts.refusal import Refusal

MESSAGE_COLUMNS = ("messages", "conversations")
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "human": "user",
    "gpt": "assistant",
}

Message = dict[str, str]


def first_given(row: dict[str, Any], columns: tuple[str, ...]) -> str | None:
    """Return the first of `columns` that the row has a value for."""
    return next((column for column in columns if row.get(column) is not None), None)


def conversation_entries(row: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return the name of the column that holds the conversation, and its messages as they are.

    Raises:
        Refusal: no_known_shape, empty or bad_content.
    """
    column = first_given(row, (*MESSAGE_COLUMNS, "turns", "prompt"))
    if column is None:
        raise Refusal("no_known_shape", f"columns {', '.join(row)[:200] or '(none)'}")
    value = [row["prompt"]] if column == "prompt" else row[column]
    if not isinstance(value, list):
        raise Refusal("bad_content", f"{column} is of type {type(value).__name__}, not a list")
    if not value:
        raise Refusal("empty", f"{column} has no entries")
    if column in MESSAGE_COLUMNS:
        return column, value
    return column, [{"role": "user", "content": text} for text in value]


def kept_messages(entries: list[Any]) -> list[Message]:
    """Return the messages that stay, each with just the fields it has.

    Raises:
        Refusal: unknown_role, system_not_first, no_user_turn, empty, bad_content or bad_tools.
    """
    roles = [_role(entry, position) for position, entry in enumerate(entries)]
    if "system" in roles[1:]:
        raise Refusal("system_not_first", f"message {roles.index('system', 1)}")
    kept = []
    for position, (entry, role, following) in enumerate(
        zip(entries, roles, [*roles[1:], ""], strict=True)
    ):
        if role != "assistant":
            kept.append(_message(entry, role, position))
        elif following == "tool" and (
            calls := functions_json(entry.get("tool_calls"), f"tool_calls of message {position}")
        ):
            kept.append({"role": role, "tool_calls": calls})
    if "user" not in roles:
        raise Refusal("no_user_turn", f"roles {', '.join(dict.fromkeys(roles))}")
    _check_evidence(kept)
    return kept


def _role(entry: Any, position: int) -> str:
    if not isinstance(entry, dict):
        raise Refusal("bad_content", f"message {position} is of type {type(entry).__name__}")
    name = _either(entry, "role", "from")
    if not isinstance(name, str) or name not in ROLES:
        shown = repr(name[:40]) if isinstance(name, str) else f"of type {type(name).__name__}"
        raise Refusal("unknown_role", f"message {position}: role {shown}")
    return ROLES[name]


def _either(entry: dict[str, Any], key: str, other: str) -> Any:
    value = entry.get(key)
    return entry.get(other) if value is None else value


def _message(entry: dict[str, Any], role: str, position: int) -> Message:
    content = _text(_either(entry, "content", "value"), position)
    if role == "user" and not content.strip():
        raise Refusal("empty", f"message {position}: the user says nothing")
    message = {"role": role, "content": content}
    for field in ("tool_call_id", "name"):
        value = entry.get(field)
        if value is not None and not isinstance(value, str):
            raise Refusal("bad_content", f"message {position}: {field} is not text")
        if value is not None:
            message[field] = value
    return message


def _text(content: Any, position: int) -> str:
    """Return the text of a message; text parts are joined with nothing between, as chat templates do."""
    if isinstance(content, str):
        return content
    if content is None:
        raise Refusal("empty", f"message {position} has no content")
    if not isinstance(content, list):
        raise Refusal(
            "bad_content", f"message {position}: content of type {type(content).__name__}"
        )
    texts = [part.get("text") for part in content if _is_text_part(part)]
    if len(texts) < len(content):
        raise Refusal("bad_content", f"message {position}: a content part that is not text")
    return "".join(texts)


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def functions_json(value: Any, where: str) -> str | None:
    """Return tools or tool calls (a list or its JSON) as compact JSON in the order given, or None for none.

    Raises:
        Refusal: bad_tools.
    """
    if isinstance(value, str):
        try:
            value = orjson.loads(value.strip() or b"null")
        except orjson.JSONDecodeError as error:
            raise Refusal("bad_tools", f"{where}: {error}") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(_names_a_function(item) for item in value):
        raise Refusal("bad_tools", f"{where}: not a list of {{function: {{name: …}}}}")
    return to_json(value)


def _names_a_function(item: Any) -> bool:
    function = item.get("function") if isinstance(item, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) and bool(name)


def _check_evidence(messages: list[Message]) -> None:
    """Check that every tool result answers a call made just before it, after a user turn."""
    open_calls: list[str | None] = []
    asked = False
    for message in messages:
        asked = asked or message["role"] == "user"
        if message["role"] == "tool":
            _close_call(open_calls, message.get("tool_call_id"))
        elif message["role"] == "assistant":
            open_calls = [call.get("id") for call in orjson.loads(message["tool_calls"])]
            if not asked:
                raise Refusal("bad_content", "a tool call before the first user turn")
        else:
            open_calls = []


def _close_call(open_calls: list[str | None], call_id: str | None) -> None:
    """Take the call that `call_id` answers off the list: by its id, or the first where one has none."""
    if call_id in open_calls:
        open_calls.remove(call_id)
    elif open_calls and call_id is None:
        open_calls.pop(0)
    elif None in open_calls:
        open_calls.remove(None)
    else:
        raise Refusal("bad_content", "a tool result without the call that it answers")


def to_json(value: Any) -> str:
    """Return `value` as compact JSON, its order kept; what JSON has no word for becomes text.

    Raises:
        Refusal: malformed_json, where it is nested too deeply to be written.
    """
    try:
        return str(orjson.dumps(value, default=str), "utf-8")
    except TypeError as error:
        raise Refusal("malformed_json", f"cannot be written back: {error}") from None
