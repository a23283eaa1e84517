"""How conversations become prompts, under real tokenizers and templates; tests/workflow holds the server to the same."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from rebuild.tokens.chat import (
    THINK_END,
    THINK_START,
    UnrenderableError,
    load_tokenizer,
    render_prompt,
    split_reasoning,
    stop_ids,
    template_tool,
    to_chat_messages,
    token_id,
)
from tests.support.conversations import CONVERSATIONS, TWO_CALLS, WEATHER, call, row

QUESTION = [row("user", "Why?")]


@pytest.fixture(scope="session")
def qwen36(qwen36_tokenizer: Path) -> Any:
    return load_tokenizer(qwen36_tokenizer, trust_remote_code=False)


@pytest.fixture(scope="session")
def qwen3(qwen3_tokenizer: Path) -> Any:
    return load_tokenizer(qwen3_tokenizer, trust_remote_code=False)


@pytest.fixture(scope="session")
def smollm2(demo_model: Path) -> Any:
    return load_tokenizer(demo_model, trust_remote_code=False)


def rendered(
    tokenizer: Any,
    rows: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    **template_kwargs: Any,
) -> str:
    """Render the rows of a conversation and return the text that the ids stand for."""
    ids = render_prompt(tokenizer, to_chat_messages(rows), tools, template_kwargs)
    return str(tokenizer.decode(ids))


def test_columns_without_a_value_are_not_sent() -> None:
    assert to_chat_messages([row("user", "Hi")]) == [{"role": "user", "content": "Hi"}]


def test_tool_calls_are_sent_as_a_list_and_their_arguments_as_they_were() -> None:
    (message,) = to_chat_messages([TWO_CALLS])
    assert [one["id"] for one in message["tool_calls"]] == ["call_a", "call_b"]
    assert message["tool_calls"] == json.loads(TWO_CALLS["tool_calls"])


def test_empty_text_is_sent_as_empty_text() -> None:
    assert to_chat_messages([row("assistant", "")]) == [{"role": "assistant", "content": ""}]


def test_rendering_changes_neither_messages_nor_tools(qwen36: Any) -> None:
    messages = to_chat_messages(CONVERSATIONS["two tool results, then a question"])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "dict"}}}]
    before = copy.deepcopy((messages, tools))
    render_prompt(qwen36, messages, tools, {})
    assert (messages, tools) == before


def test_ids_are_plain_integers(qwen36: Any) -> None:
    ids = render_prompt(qwen36, to_chat_messages(QUESTION), None, {})
    assert {type(token) for token in ids} == {int}
    assert ids[0] == 248045


def test_smollm2_gets_its_default_system_prompt_and_no_thought(smollm2: Any) -> None:
    assert rendered(smollm2, QUESTION) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen36_opens_a_thought_unless_thinking_is_off(qwen36: Any) -> None:
    assert rendered(qwen36, QUESTION).endswith("<|im_start|>assistant\n<think>\n")
    closed = rendered(qwen36, QUESTION, enable_thinking=False)
    assert closed.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_qwen3_opens_no_thought_itself(qwen3: Any) -> None:
    assert rendered(qwen3, QUESTION).endswith("<|im_start|>assistant\n")


def test_past_thoughts_are_dropped_unless_they_are_to_be_kept(qwen36: Any) -> None:
    past = CONVERSATIONS["past reasoning"]
    assert "Two and two." not in rendered(qwen36, past)
    kept = rendered(qwen36, past, preserve_thinking=True)
    assert "<think>\nTwo and two.\n</think>\n\n4<|im_end|>" in kept
    assert "<think>\n\n</think>\n\n6<|im_end|>" in kept


def test_a_marker_spelled_out_by_the_user_becomes_the_special_token(qwen36: Any) -> None:
    ids = render_prompt(qwen36, to_chat_messages(CONVERSATIONS["special tokens in text"]), None, {})
    assert ids.count(token_id(qwen36, "<|im_end|>")) == 2


def test_a_tool_is_printed_in_its_own_key_order_with_what_the_server_adds(qwen36: Any) -> None:
    text = rendered(qwen36, QUESTION, [WEATHER])
    shown = text.split("<tools>\n")[1].split("\n</tools>")[0]
    assert shown == json.dumps(WEATHER | {"defer_loading": None}, ensure_ascii=False)


def test_a_tools_missing_fields_follow_as_null_and_unknown_ones_are_dropped() -> None:
    tool = {"function": {"parameters": {"type": "map"}, "name": "f", "x": 1, "strict": None}}
    assert json.dumps(template_tool(tool)) == (
        '{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "description": null}, '
        '"defer_loading": null}'
    )


def test_a_strict_tool_stays_strict() -> None:
    tool = {"type": "function", "function": {"strict": True, "name": "f"}}
    assert list(template_tool(tool)["function"]) == ["strict", "name", "description", "parameters"]


def test_arguments_are_printed_as_values_not_as_json_text(qwen36: Any) -> None:
    text = rendered(qwen36, CONVERSATIONS["two tool results, then a question"])
    assert "<parameter=city>\n東京\n</parameter>" in text
    assert "<parameter=days>\n2.0\n</parameter>" in text
    assert "<parameter=city>\nA\nB\n</parameter>" in text


def test_a_message_without_content_is_an_empty_one(smollm2: Any) -> None:
    assert "<|im_start|>assistant\n<|im_end|>\n" in rendered(smollm2, CONVERSATIONS["tool result"])


def test_the_template_sees_of_a_user_message_only_role_and_content(smollm2: Any) -> None:
    names = copy.deepcopy(smollm2)
    names.chat_template = "{% for m in messages %}{{ m.role }}={{ m.name }};{% endfor %}"
    assert rendered(names, CONVERSATIONS["named user"]) == "system=boss;user=;"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "must end"),
        ([row("user", "Hi"), row("assistant", "Ho")], "must end"),
        ([row("system", "Be brief.")], "No user query"),
        ([row("user", "Hi"), row("system", "late"), row("user", "Ho")], "System message must be"),
    ],
)
def test_a_conversation_that_the_template_refuses_is_named_not_fatal(
    qwen36: Any, rows: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(UnrenderableError, match=reason):
        rendered(qwen36, rows)


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", ""])
def test_arguments_that_are_no_json_object_are_refused_as_the_server_does(
    qwen36: Any, arguments: str
) -> None:
    calls = json.dumps([call("f", arguments)])
    rows = [row("user", "Hi"), row("assistant", None, tool_calls=calls), row("tool", "x")]
    with pytest.raises(UnrenderableError, match="arguments"):
        rendered(qwen36, rows)


def test_a_tokenizer_cuts_text_as_its_own_file_says_whatever_its_class(
    qwen3_tokenizer: Path, tmp_path: Path
) -> None:
    """Qwen's tokenizer under Llama's class: what DeepSeek's distilled models are."""
    folder = Path(shutil.copytree(qwen3_tokenizer, tmp_path / "tokenizer"))
    config = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", config | {"tokenizer_class": "LlamaTokenizerFast"})
    text = "Grüße 2024,\n\n  世界 don't"
    own = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False) != own
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    assert tokenizer.encode(text, add_special_tokens=False) == own
    assert tokenizer.decode(own) == text


def test_a_tokenizer_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path, trust_remote_code=False)


def test_an_answer_ends_at_the_manifests_and_the_tokenizers_end_tokens(qwen36: Any) -> None:
    assert stop_ids(qwen36, [248044]) == {248044, 248046}


def test_think_markers_are_found_where_the_vocabulary_has_them(qwen36: Any, smollm2: Any) -> None:
    assert (token_id(qwen36, THINK_START), token_id(qwen36, THINK_END)) == (248068, 248069)
    assert token_id(smollm2, THINK_END) is None


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ([5, 6, 9, 7, 8], ([5, 6], [7, 8])),
        ([9, 7], ([], [7])),
        ([5, 9], ([5], [])),
        ([5, 9, 7, 9, 8], ([5], [7, 9, 8])),
        ([5, 6], None),
        ([], None),
    ],
)
def test_a_thought_ends_at_its_first_end_marker(
    response: list[int], expected: tuple[list[int], list[int]] | None
) -> None:
    assert split_reasoning(response, 9) == expected


def test_without_an_end_marker_in_the_vocabulary_no_thought_is_closed() -> None:
    assert split_reasoning([1, 2, 3], None) is None


@given(st.lists(st.integers(0, 9)), st.integers(0, 9))
def test_the_parts_and_the_marker_are_the_whole_answer(response: list[int], marker: int) -> None:
    parts = split_reasoning(response, marker)
    if parts is None:
        assert marker not in response
    else:
        assert [*parts[0], marker, *parts[1]] == response
        assert marker not in parts[0]
