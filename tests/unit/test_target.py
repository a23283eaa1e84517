"""The target model as the audit knows it: real tokenizers and templates of models that think and that do not."""

import json
from pathlib import Path
from typing import Any

import pytest

from rebuild.audit.target import Target, load_folder, load_target
from rebuild.errors import StepError
from tests.support.conversations import CALLED, WEATHER
from tests.support.conversations import row as message
from tests.support.real_shards import Speaker, qwen3, smollm2

QUESTION = [message("user", "How deep is the harbour?")]


@pytest.fixture(scope="module")
def qwen(qwen3_tokenizer: Path) -> Speaker:
    return qwen3(qwen3_tokenizer)


@pytest.fixture(scope="module")
def smol(demo_model: Path) -> Speaker:
    return smollm2(demo_model)


@pytest.fixture(scope="module")
def qwen36(qwen36_tokenizer: Path) -> Target:
    return load_folder(qwen36_tokenizer)


def asked(speaker: Speaker, **changes: Any) -> dict[str, Any]:
    """Return a row with a prompt that is as the template renders it."""
    row = {"messages": QUESTION, "tools": None} | changes
    return {"prompt_token_ids": speaker.render(row["messages"], row["tools"])} | row


def said(speaker: Speaker, text: str, content: str, **changes: Any) -> dict[str, Any]:
    """Return a row whose ids are those of `text`, the stop token after them, and which was served as `content`."""
    ids = [*speaker.encode(text), speaker.stop_id]
    row = {"response_token_ids": ids, "finish_reason": "stop", "content": content}
    return row | {"reasoning": None, "tool_calls": None, "tools": None} | changes


@pytest.mark.parametrize("tools", [None, json.dumps([WEATHER])])
def test_a_prompt_as_the_template_renders_it_does_not_differ(
    qwen: Speaker, smol: Speaker, tools: str | None
) -> None:
    for speaker in (qwen, smol):
        assert speaker.target.difference(asked(speaker, tools=tools)) == ""


def test_the_first_difference_is_told_with_its_place_and_both_texts(smol: Speaker) -> None:
    row = asked(smol)
    place = len(row["prompt_token_ids"]) - 5
    row["prompt_token_ids"] = [*row["prompt_token_ids"][:place], *smol.encode(" there")]
    told = smol.target.difference(row)
    assert told.startswith(
        f"{place + 1} ids instead of {place + 5}, different from id {place} on: "
    )
    assert "' there' instead of" in told


def test_a_prompt_that_is_longer_or_shorter_differs_at_its_end(smol: Speaker) -> None:
    row = asked(smol)
    ids = row["prompt_token_ids"]
    for seen in (ids[:-1], [*ids, 198], []):
        place = min(len(ids), len(seen))
        told = smol.target.difference(row | {"prompt_token_ids": seen})
        assert f"different from id {place} on" in told


def test_a_conversation_that_cannot_be_rendered_is_told_as_such(qwen: Speaker) -> None:
    row = asked(qwen) | {"messages": [*QUESTION, message("assistant", "Deep.")]}
    assert qwen.target.difference(row).startswith("its messages cannot be rendered: ")
    broken = json.loads(CALLED["tool_calls"])
    broken[0]["function"]["arguments"] = "{"
    calling = message("assistant", "", tool_calls=json.dumps(broken))
    row = asked(qwen) | {"messages": [*QUESTION, calling, message("tool", "21")]}
    assert "arguments are not JSON" in qwen.target.difference(row)


def test_ids_beyond_the_vocabulary_are_left_out_of_texts(smol: Speaker) -> None:
    assert smol.target.text([*smol.encode("Deep"), 49152, -1, 10**9]) == "Deep"
    row = said(smol, "Deep.", "Deep.")
    row["response_token_ids"] = [10**6, *row["response_token_ids"]]
    assert not smol.target.says_otherwise(row)


def test_ids_and_texts_say_the_same_but_for_white_space_tags_and_normal_forms(
    qwen: Speaker, smol: Speaker
) -> None:
    thought = said(qwen, "<think>\nHm.\n</think>\n\nDeep.", "Deep.", reasoning="Hm.")
    assert not qwen.target.says_otherwise(thought)
    assert not smol.target.says_otherwise(said(smol, "Cafe\u0301\n\n deep", "Café deep"))


@pytest.mark.parametrize("content", ["Deep", "Deep. So.", "", "deep."])
def test_any_other_word_or_sign_is_another_text(smol: Speaker, content: str) -> None:
    assert smol.target.says_otherwise(said(smol, "Deep.", content))


def test_a_cut_answer_has_no_stop_token_that_could_be_left_out(smol: Speaker) -> None:
    row = said(smol, "Deep.", "Deep.") | {"finish_reason": "length"}
    row["response_token_ids"] = smol.encode("Deep.")
    assert not smol.target.says_otherwise(row)
    assert smol.target.says_otherwise(row | {"finish_reason": "stop"})


def test_calls_that_the_server_took_out_of_the_text_are_no_difference(qwen: Speaker) -> None:
    text = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    calls = json.dumps([{"function": {"name": "get_weather", "arguments": "{}"}}])
    tools = json.dumps([WEATHER])
    row = said(qwen, text, "I look.", tools=tools, tool_calls=calls)
    assert not qwen.target.says_otherwise(row)
    other = json.dumps([{"function": {"name": "delete_all", "arguments": "{}"}}])
    assert qwen.target.says_otherwise(row | {"tool_calls": other})
    assert qwen.target.says_otherwise(row | {"tools": None})


def test_one_thought_belongs_to_an_answer_and_a_second_does_not(qwen: Speaker) -> None:
    thought = "<think>\nHm.\n</think>\n\n"
    row = said(qwen, f"{thought}Deep.", "Deep.")
    assert qwen.target.stray_marker(row) == ""
    twice = said(qwen, f"{thought}{thought}Deep.", "Deep.")
    assert qwen.target.stray_marker(twice) == "token <think>"
    closed = said(qwen, f"{thought}Deep.</think>", "Deep.")
    assert qwen.target.stray_marker(closed) == "token </think>"


def test_markers_of_turns_do_not_belong_to_an_answer_as_tokens_or_spelled_out(
    qwen: Speaker, smol: Speaker
) -> None:
    for speaker in (qwen, smol):
        token = said(speaker, "Deep.<|im_start|>user\nAnd?", "Deep.user\nAnd?")
        assert speaker.target.stray_marker(token) == "token <|im_start|>"
        stop = said(speaker, "Deep.<|im_end|>\n", "Deep.\n")
        assert speaker.target.stray_marker(stop) == "token <|im_end|>"
        spelled = said(speaker, "Deep.", "Deep.<|im_end|>")
        assert speaker.target.stray_marker(spelled) == "text <|im_end|>"


def test_the_stop_token_at_the_end_and_tool_calls_are_no_stray_markers(qwen: Speaker) -> None:
    assert qwen.target.stray_marker(said(qwen, "Deep.", "Deep.")) == ""
    called = said(qwen, "<tool_call>\n{}\n</tool_call>", "")
    assert qwen.target.stray_marker(called) == ""


def test_a_model_is_expected_to_think_where_its_template_says_so(
    qwen: Speaker, smol: Speaker, qwen3_tokenizer: Path
) -> None:
    silent = qwen3(qwen3_tokenizer, enable_thinking=False)
    for speaker, thinks in [(qwen, True), (smol, False), (silent, False)]:
        assert speaker.target.thinks(asked(speaker)) is thinks


def test_a_thought_that_the_prompt_opens_is_expected_to_go_on(qwen36: Target) -> None:
    tokenizer = qwen36.judge.tokenizer
    question = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    opened = {"prompt_token_ids": tokenizer.encode(f"{question}<think>\n")}
    assert qwen36.thinks(opened)


def test_the_vocabulary_is_the_larger_of_the_models_and_the_tokenizers(
    qwen3_tokenizer: Path, qwen: Speaker
) -> None:
    assert qwen.target.vocab_size == 151936
    assert load_folder(qwen3_tokenizer).vocab_size == len(qwen.judge.tokenizer) == 151669


def test_every_way_to_end_an_answer_is_known(qwen: Speaker, smol: Speaker) -> None:
    assert qwen.judge.stop_ids == {151643, 151645}
    assert smol.judge.stop_ids == {2}
    assert {qwen.target.markers[token] for token in (151643, 151644, 151645, 151667, 151668)} == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
    }


def test_a_folder_without_a_tokenizer_stops(tmp_path: Path) -> None:
    model = {"path": str(tmp_path), "trust_remote_code": False}
    with pytest.raises(StepError, match="the model's tokenizer cannot be loaded"):
        load_target(model | {"eos_token_ids": [], "vocab_size": 1}, {})
