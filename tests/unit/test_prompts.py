"""The specification of a prompt: what becomes of one row, and why it may be refused."""

import hashlib
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.prompts.refusal import REASONS, Refusal
from rebuild.prompts.rows import parse_row
from rebuild.prompts.rows_to_prompts import content_hash, conversation_digest, given_id, to_prompt
from rebuild.tables import PROMPTS

USER = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}
CALLING_TWICE = CALLING | {"tool_calls": [CALL, CALL | {"id": "c2"}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12:00"}
NAMELESS = {"role": "tool", "content": "12:00"}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


def spoken(row: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(m["role"], m["content"]) for m in to_prompt(row, "file.jsonl")["messages"]]


def refusal_of(row: dict[str, Any], **limits: int) -> str:
    with pytest.raises(Refusal) as caught:
        to_prompt(row, "file.jsonl", **limits)
    assert caught.value.detail
    return caught.value.reason


# Shapes


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
        {"conversations": [USER]},
        {"conversations": [{"from": "human", "value": "Hello"}]},
        {"conversations": [{"from": "user", "value": "Hello"}]},
        {"turns": ["Hello"]},
        {"prompt": "Hello"},
    ],
    ids=lambda row: json.dumps(row)[:50],
)
def test_every_shape_gives_the_same_messages_and_the_same_hash_as_id(row):
    assert spoken(row) == [("user", "Hello")]
    assert to_prompt(row, "")["prompt_id"] == to_prompt({"prompt": "Hello"}, "")["prompt_id"]


def test_from_and_value_are_mapped_to_role_and_content():
    row = {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello!"},
            {"from": "human", "value": "Bye"},
        ]
    }
    assert spoken(row) == [("system", "Be brief."), ("user", "Hi"), ("user", "Bye")]


def test_turns_are_user_messages_in_order():
    assert spoken({"turns": ["One", "Two"]}) == [("user", "One"), ("user", "Two")]


def test_text_parts_are_joined_with_nothing_between():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert spoken({"messages": [{"role": "user", "content": parts}]}) == [("user", "one two")]


def test_messages_come_before_the_other_shapes_and_the_rest_is_kept_in_extra():
    prompt = to_prompt({"messages": [USER], "prompt": "Hi", "score": 0.5, "tags": ["a"]}, "")
    assert prompt["messages"][0]["content"] == "Hello"
    assert json.loads(prompt["extra"]) == {"prompt": "Hi", "score": 0.5, "tags": ["a"]}


def test_a_prompt_has_exactly_the_columns_and_the_message_fields_of_its_table():
    prompt = to_prompt({"prompt": "Hello"}, "")
    assert list(prompt) == PROMPTS.names
    message_type = PROMPTS.field("messages").type.value_type
    assert list(prompt["messages"][0]) == [field.name for field in message_type]


def test_the_source_is_the_given_one_or_else_the_file():
    assert to_prompt({"prompt": "Hi", "source": "mine"}, "file.jsonl")["source"] == "mine"
    for nothing in ({}, {"source": None}, {"source": ""}):
        prompt = to_prompt({"prompt": "Hi"} | nothing, "file.jsonl")
        assert (prompt["source"], prompt["extra"]) == ("file.jsonl", None)
    odd = to_prompt({"prompt": "Hi", "source": {"url": "x"}}, "file.jsonl")
    assert (odd["source"], json.loads(odd["extra"])) == ("file.jsonl", {"source": {"url": "x"}})


# Assistant turns and tool evidence


def test_plain_assistant_text_and_its_reasoning_are_dropped_wherever_they_stand():
    said = {"role": "assistant", "content": "Hm.", "reasoning_content": "Thinking"}
    prompt = to_prompt({"messages": [said, USER, said, USER, said]}, "")
    assert [m["role"] for m in prompt["messages"]] == ["user", "user"]
    assert all(m["reasoning_content"] is None for m in prompt["messages"])


def test_a_tool_call_stays_without_its_text_where_its_result_follows():
    row = {"messages": [USER, CALLING, RESULT, {"role": "assistant", "content": "Noon."}, USER]}
    messages = to_prompt(row, "")["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["content"] is None
    assert json.loads(messages[1]["tool_calls"]) == [CALL]
    assert (messages[2]["tool_call_id"], messages[2]["content"]) == ("c1", "12:00")


def test_a_tool_call_without_a_result_is_dropped_like_any_answer():
    assert spoken({"messages": [USER, CALLING, USER]}) == [("user", "Hello"), ("user", "Hello")]


def test_tool_calls_may_be_given_as_json():
    calling = CALLING | {"tool_calls": json.dumps([CALL])}
    messages = to_prompt({"messages": [USER, calling, RESULT]}, "")["messages"]
    assert json.loads(messages[1]["tool_calls"]) == [CALL]


def test_a_result_without_an_id_answers_the_next_open_call():
    messages = to_prompt({"messages": [USER, CALLING_TWICE, NAMELESS, NAMELESS]}, "")["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]


def test_two_calls_may_be_answered_in_either_order():
    results = [RESULT | {"tool_call_id": "c2"}, RESULT]
    messages = to_prompt({"messages": [USER, CALLING_TWICE, *results]}, "")["messages"]
    assert [m["tool_call_id"] for m in messages[2:]] == ["c2", "c1"]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, RESULT],
        [USER, {"role": "assistant", "content": "<tool_call>clock</tool_call>"}, RESULT],
        [USER, CALLING, RESULT | {"tool_call_id": "other"}],
        [USER, CALLING, RESULT, RESULT],
        [USER, CALLING, NAMELESS, NAMELESS],
        [USER, CALLING | {"tool_calls": [TOOL]}, RESULT, RESULT],
        [USER, CALLING_TWICE, RESULT, USER, RESULT | {"tool_call_id": "c2"}],
        [CALLING, RESULT, USER],
    ],
    ids=[
        "no call",
        "call as text",
        "other id",
        "two results",
        "two without id",
        "two for a call without id",
        "a turn later",
        "before the user",
    ],
)
def test_a_tool_result_that_answers_no_recorded_call_is_refused(messages):
    assert refusal_of({"messages": messages}) == "bad_content"


def test_tools_are_kept_as_json_in_the_order_given():
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    as_list = to_prompt({"prompt": "Hi", "tools": [tool]}, "")["tools"]
    assert as_list == json.dumps([tool], separators=(",", ":"))
    assert to_prompt({"prompt": "Hi", "tools": json.dumps([tool])}, "")["tools"] == as_list


@pytest.mark.parametrize("nothing", [None, [], "", "[]", "null"])
def test_no_tools_is_null_however_it_is_said(nothing):
    assert to_prompt({"prompt": "Hi", "tools": nothing}, "")["tools"] is None


def test_an_empty_system_message_stays_for_it_silences_a_template_s_default():
    assert spoken({"messages": [{"role": "system", "content": ""}, USER]})[0] == ("system", "")


# Ids and hashes


@pytest.mark.parametrize("column", ["prompt_id", "id", "conversation_id", "question_id"])
def test_a_given_id_is_kept_as_text(column):
    assert to_prompt({"prompt": "Hi", column: 81}, "")["prompt_id"] == "81"
    assert to_prompt({"prompt": "Hi", column: "a/b: ü"}, "")["prompt_id"] == "a/b: ü"


def test_the_first_given_id_counts_and_another_stays_in_extra():
    prompt = to_prompt({"prompt": "Hi", "prompt_id": None, "id": "x", "question_id": 3}, "")
    assert prompt["prompt_id"] == "x"
    assert json.loads(prompt["extra"])["question_id"] == 3


def test_the_id_made_from_the_content_is_fixed_for_ever():
    canonical = b'{"messages":[{"content":"Hello","role":"user"}],"tools":null}'
    expected = hashlib.sha256(canonical).hexdigest()[:16]
    assert to_prompt({"prompt": "Hello"}, "")["prompt_id"] == expected == "9d3c40a81a134a5c"


def test_the_id_made_from_the_content_depends_on_messages_and_tools_alone():
    plain = to_prompt({"prompt": "Hi", "source": "a", "note": 1}, "x")
    same = to_prompt({"turns": ["Hi"], "source": "b"}, "y")
    tooled = to_prompt({"prompt": "Hi", "tools": [TOOL]}, "x")
    assert plain["prompt_id"] == same["prompt_id"] == conversation_digest(plain).hex()[:16]
    assert plain["prompt_id"] != tooled["prompt_id"]


@pytest.mark.parametrize(
    "bad", ["", "a\nb", "a\x00", "\x85", "x" * 201, 1.5, True, ["a"], {"a": 1}]
)
def test_an_id_is_short_text_without_control_characters_or_a_whole_number(bad):
    with pytest.raises(Refusal) as caught:
        given_id({"id": bad})
    assert caught.value.reason == "bad_id"


def test_the_content_hash_is_fixed_for_ever_and_depends_on_the_order():
    one, two = to_prompt({"prompt": "One"}, "f"), to_prompt({"prompt": "Two"}, "f")
    line = (
        '{"extra":null,"messages":[{"content":"%s","name":null,"reasoning_content":null,"role":"user",'
        '"tool_call_id":null,"tool_calls":null}],"prompt_id":"%s","source":"f","tools":null}\n'
    )
    lines = line % ("One", one["prompt_id"]) + line % ("Two", two["prompt_id"])
    assert content_hash([one, two]) == hashlib.sha256(lines.encode()).hexdigest()
    assert content_hash([two, one]) != content_hash([one, two])


# Reasons


def test_every_reason_has_its_meaning():
    assert all(REASONS.values())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no_known_shape"),
        ({"text": "Hi"}, "no_known_shape"),
        ({"messages": None, "prompt": None}, "no_known_shape"),
        ({"messages": []}, "empty"),
        ({"turns": []}, "empty"),
        ({"prompt": " \n\u3000"}, "empty"),
        ({"messages": [USER, {"role": "user", "content": None}]}, "empty"),
        ({"messages": [{"role": "user", "content": []}]}, "empty"),
        ({"messages": [{"role": "system", "content": "Hi"}]}, "no_user_turn"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "no_user_turn"),
        ({"messages": [{"role": "developer", "content": "Hi"}]}, "unknown_role"),
        ({"messages": [{"content": "Hi"}]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "unknown_role"),
        ({"messages": [USER, {"role": "system", "content": "Hi"}]}, "system_not_first"),
        ({"messages": [{"role": "system", "content": "Hi"}] * 2 + [USER]}, "system_not_first"),
        ({"messages": "Hi"}, "bad_content"),
        ({"messages": ["Hi"]}, "bad_content"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "bad_content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "bad_content"),
        ({"messages": [USER | {"name": 3}]}, "bad_content"),
        ({"prompt": {"text": "Hi"}}, "bad_content"),
        ({"turns": "Hi"}, "bad_content"),
        ({"turns": ["Hi", 2]}, "bad_content"),
        ({"prompt": "Hi", "tools": "not JSON"}, "bad_tools"),
        ({"prompt": "Hi", "tools": {"name": "clock"}}, "bad_tools"),
        ({"prompt": "Hi", "tools": [{"name": "clock"}]}, "bad_tools"),
        ({"prompt": "Hi", "tools": [{"function": {"name": ""}}]}, "bad_tools"),
        ({"messages": [USER, CALLING | {"tool_calls": ["clock"]}, RESULT]}, "bad_tools"),
        ({"prompt": "Hi", "id": ""}, "bad_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:60],
)
def test_a_row_that_is_no_prompt_is_refused(row, reason):
    assert refusal_of(row) == reason


def test_characters_of_messages_tool_calls_and_tools_count_against_the_limit():
    rows = [
        {"turns": ["12345", "67890"]},
        {"prompt": "1", "tools": [TOOL]},
        {"messages": [{"role": "user", "content": "1"}, CALLING, {"role": "tool", "content": "2"}]},
    ]
    assert [refusal_of(row, max_chars=9) for row in rows] == ["too_long"] * 3
    assert to_prompt({"turns": ["1234", "56789"]}, "", max_chars=9)


def test_columns_nested_too_deeply_to_be_written_are_refused():
    assert refusal_of({"prompt": "Hi", "note": parse_row(b'{"a":' * 300 + b"1" + b"}" * 300)}) == (
        "malformed_json"
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
columns = st.sampled_from(["messages", "conversations", "turns", "prompt", "id", "tools", "source"])
message_keys = st.sampled_from(["role", "from", "content", "value", "tool_calls", "tool_call_id"])
words = st.sampled_from(["user", "assistant", "tool", "human", "Hi", "", "[]"])
almost_messages = st.lists(st.dictionaries(message_keys, words | json_values), max_size=3)


@given(st.dictionaries(columns, almost_messages | words | json_values))
def test_any_object_becomes_a_prompt_or_is_refused_with_a_known_reason(row):
    try:
        prompt = to_prompt(row, "file.jsonl")
    except Refusal as refusal:
        assert refusal.reason in REASONS
    else:
        assert pa.Table.from_pylist([prompt], schema=PROMPTS).to_pylist() == [prompt]
