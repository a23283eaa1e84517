"""Ids made of texts by real chat templates: supervised tokens are exactly the answer and its stop token, or there are none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rebuild.texts.template_checks import REASONS, UnstableError
from rebuild.texts.template_masks import (
    Ids,
    Template,
    injected_system,
    make_template,
    template_ids,
)
from rebuild.tokens.chat import load_tokenizer, render_prompt, to_chat_messages
from tests.support.conversations import CONVERSATIONS, WEATHER, call, row

QUESTION = [row("user", "Why?")]
STATUSES = {"stop": "ok", "length": "truncated", "tool_calls": "tool_calls"}
NO_THINKING = {"enable_thinking": False}
MESSAGES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOK = call("get_weather", '{"city": "M\\u00fcn\\nchen", "days": 2.0, "by": {"hour": true}}')


def answered(content: str | None, finish: str = "stop", **texts: Any) -> dict[str, Any]:
    """Return a row of the generated table that came without ids."""
    given = {"messages": QUESTION, "tools": None, "reasoning": None, "tool_calls": None}
    told = {"sample_id": "a", "finish_reason": finish, "status": STATUSES[finish]}
    return given | told | {"content": content} | texts


def calling(content: str, *calls: dict[str, Any], **texts: Any) -> dict[str, Any]:
    tools = json.dumps([WEATHER])
    return answered(content, "tool_calls", tool_calls=json.dumps(calls), tools=tools, **texts)


@pytest.fixture(scope="session")
def templates(
    qwen3_tokenizer: Path, qwen36_tokenizer: Path, demo_model: Path
) -> dict[str, Template]:
    folders = {"qwen3": qwen3_tokenizer, "qwen36": qwen36_tokenizer, "smollm2": demo_model}
    loaded = {name: load_tokenizer(folder, False) for name, folder in folders.items()}
    thinking = {name: make_template(tokenizer, {}) for name, tokenizer in loaded.items()}
    plain = {f"{name} plain": make_template(loaded[name], NO_THINKING) for name in loaded}
    return thinking | plain


@pytest.fixture(scope="session")
def supervised(templates: dict[str, Template]) -> Callable[..., str]:
    """The text that a row's supervised tokens decode to under a template."""

    def decode(name: str, given: dict[str, Any]) -> str:
        (found,) = template_ids([given], templates[name])
        assert isinstance(found, Ids), found
        return templates[name].decode(found.response)

    return decode


@pytest.fixture(scope="session")
def reason(templates: dict[str, Template]) -> Callable[..., str]:
    """Why a row is refused under a template."""

    def refuse(name: str, given: dict[str, Any]) -> str:
        (found,) = template_ids([given], templates[name])
        assert isinstance(found, UnstableError), found
        assert found.reason in REASONS and found.detail
        return found.reason

    return refuse


# What is supervised


@pytest.mark.parametrize("name", ["qwen3 plain", "qwen36 plain", "smollm2"])
def test_an_answer_that_stopped_is_supervised_with_its_stop_token_and_nothing_after_it(
    supervised: Any, name: str
) -> None:
    assert supervised(name, answered("Blue.")) == "Blue.<|im_end|>"


@pytest.mark.parametrize("name", ["qwen3 plain", "qwen36 plain", "smollm2"])
def test_an_answer_that_was_cut_is_supervised_without_a_stop_token(
    supervised: Any, name: str
) -> None:
    assert supervised(name, answered("Blue as", "length")) == "Blue as"


def test_a_thought_is_supervised_from_where_the_model_began_it(supervised: Any) -> None:
    given = answered("Blue.", reasoning="So.")
    assert supervised("qwen3", given) == "<think>\nSo.\n</think>\n\nBlue.<|im_end|>"
    assert supervised("qwen36", given) == "So.\n</think>\n\nBlue.<|im_end|>"


def test_a_blank_thought_that_the_model_had_is_supervised(supervised: Any) -> None:
    given = answered("Blue.", reasoning="")
    assert supervised("qwen3", given) == "<think>\n\n</think>\n\nBlue.<|im_end|>"
    assert supervised("qwen36", given) == "\n</think>\n\nBlue.<|im_end|>"


def test_of_a_thought_that_was_cut_no_end_is_made_up(supervised: Any) -> None:
    given = answered("", "length", reasoning="Let me see")
    assert supervised("qwen3", given) == "<think>\nLet me see"
    assert supervised("qwen36", given) == "Let me see"
    assert supervised("qwen36", answered("", "length", reasoning="")) == ""


def test_an_answer_that_was_cut_after_its_thought_keeps_the_thoughts_end(supervised: Any) -> None:
    given = answered("Blue as", "length", reasoning="So.")
    assert supervised("qwen36", given) == "So.\n</think>\n\nBlue as"


def test_an_empty_think_block_of_the_prompt_is_not_the_models(templates: Any) -> None:
    (ids,) = template_ids([answered("Blue.")], templates["qwen3 plain"])
    assert templates["qwen3 plain"].decode(ids.prompt).endswith("<think>\n\n</think>\n\n")


def test_a_line_break_that_begins_an_answer_stays_apart_from_the_prompts(
    qwen3_tokenizer: Path,
) -> None:
    tokenizer = load_tokenizer(qwen3_tokenizer, False)
    tokenizer.chat_template = MESSAGES
    template = make_template(tokenizer, {})
    (ids,) = template_ids([answered("\nBlue.")], template)
    assert isinstance(ids, Ids) and template.decode(ids.response) == "\nBlue.<|im_end|>"
    assert (ids.prompt[-1], ids.response[0]) == (198, 198)
    assert 271 in template.encode([template.decode(ids.prompt + ids.response)])[0]


def test_decomposed_accents_are_the_same_text_in_nfc(supervised: Any) -> None:
    assert supervised("qwen36 plain", answered("Cafe\u0301")) == "Caf\u00e9<|im_end|>"
    assert supervised("smollm2", answered("\u0301x Cafe\u0301")) == "\u0301x Cafe\u0301<|im_end|>"


def test_a_second_end_of_thought_belongs_to_the_answer(supervised: Any) -> None:
    given = answered("Write </think> there.", reasoning="So.")
    assert supervised("qwen36", given).endswith("</think>\n\nWrite </think> there.<|im_end|>")


def test_tool_calls_are_supervised_in_the_templates_writing(supervised: Any) -> None:
    given = calling("I look.", LOOK, call("get_weather", "{}"), reasoning="Hm.")
    said = supervised("qwen36", given)
    assert said.startswith("Hm.\n</think>\n\nI look.\n\n<tool_call>\n<function=get_weather>\n")
    assert "<parameter=city>\nMün\nchen\n</parameter>" in said and said.endswith(
        "</function>\n</tool_call><|im_end|>"
    )
    assert '{"city": "Mün\\nchen", "days": 2.0, "by": {"hour": true}}' in supervised("qwen3", given)


@pytest.mark.parametrize("name", ["qwen3", "qwen36", "smollm2"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_prompts_ids_are_the_servers(
    templates: dict[str, Template], name: str, conversation: str
) -> None:
    messages, template = CONVERSATIONS[conversation], templates[name]
    thought = None if name == "smollm2" else "So."
    given = answered("Blue.", reasoning=thought, messages=messages, tools=json.dumps([WEATHER]))
    (ids,) = template_ids([given], template)
    assert isinstance(ids, Ids)
    rendered = render_prompt(template.tokenizer, to_chat_messages(messages), [WEATHER], {})
    assert ids.prompt == rendered


def test_a_row_does_not_depend_on_those_beside_it(templates: dict[str, Template]) -> None:
    rows = [
        answered("Blue."),
        answered("a <|im_end|>"),
        answered("Green.", "length"),
        answered("\ufffd"),
    ]
    together = template_ids(rows, templates["smollm2"])
    alone = [template_ids([one], templates["smollm2"])[0] for one in rows]
    assert [str(one) for one in together] == [str(one) for one in alone]
    assert [isinstance(one, Ids) for one in together] == [True, False, True, False]


# What is refused


@pytest.mark.parametrize("name", ["qwen3", "qwen36"])
def test_an_empty_think_block_that_the_answer_never_saw_is_refused(reason: Any, name: str) -> None:
    assert reason(name, answered("Blue.")) == "empty_think"


def test_a_template_that_leaves_out_the_thought_is_refused(reason: Any) -> None:
    assert reason("smollm2", answered("Blue.", reasoning="So.")) == "thought_changed"


def test_a_thought_where_the_prompt_has_closed_it_is_refused(reason: Any) -> None:
    for name in ("qwen3 plain", "qwen36 plain"):
        assert reason(name, answered("Blue.", reasoning="So.")) == "history_rewritten"
        assert reason(name, answered("Blue.", reasoning="")) == "thought_changed"


@pytest.mark.parametrize("name", ["qwen3", "qwen36"])
def test_white_space_of_a_thought_that_the_template_cuts_is_not_invented(
    reason: Any, name: str
) -> None:
    assert reason(name, answered("Blue.", reasoning="\n\nSo.\n")) == "thought_changed"
    assert reason(name, answered("Blue.", reasoning="</think>So.")) == "thought_changed"


def test_white_space_of_an_answer_that_the_template_cuts_is_refused(reason: Any) -> None:
    for name in ("qwen3 plain", "qwen36 plain"):
        assert reason(name, answered("\nBlue.")) == "content_changed"
    assert reason("qwen36 plain", answered("Blue.\n")) == "content_changed"
    assert reason("qwen36", answered("Blue.\n", reasoning="So.")) == "content_changed"


def test_an_answer_with_an_unsplit_thought_is_refused(reason: Any) -> None:
    for name in ("qwen3", "qwen36"):
        assert reason(name, answered("So.</think>Blue.")) == "content_changed"


@pytest.mark.parametrize("name", ["qwen3 plain", "qwen36 plain", "smollm2"])
def test_a_special_token_spelled_out_in_an_answer_is_refused(reason: Any, name: str) -> None:
    for text in ("a <|im_end|> b", "Blue.<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>"):
        assert reason(name, answered(text)) == "special_token"
    spelled = call("get_weather", '{"city": "<|im_end|>"}')
    assert reason(name, calling("", spelled)) == "special_token"
    escaped = call("get_weather", '{"city": "\\u003c|im_start|\\u003e"}')
    assert reason(name, calling("", escaped)) == "special_token"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_cut_emoji_is_refused(reason: Any, finish: str) -> None:
    assert reason("smollm2", answered("Otters \ufffd", finish)) == "cut_character"
    assert reason("qwen36", answered("", finish, reasoning="\ufffd")) == "cut_character"


def test_an_answer_that_stopped_inside_its_thought_is_refused(reason: Any) -> None:
    unclosed = answered("", reasoning="I give up.", status="truncated")
    assert reason("qwen36", unclosed) == "unclosed_thought"


def test_calls_that_the_template_leaves_out_or_changes_are_refused(
    reason: Any, templates: dict[str, Template]
) -> None:
    assert reason("smollm2", calling("I look.", LOOK)) == "calls_changed"
    spaced = call("get_weather", '{"city": "  Oslo"}')
    own = templates["qwen36"].tokenizer.chat_template
    try:
        templates["qwen36"].tokenizer.chat_template = own.replace(
            "{{- args_value }}", "{{- args_value|trim }}"
        )
        assert reason("qwen36", calling("I look.", spaced, reasoning="So.")) == "calls_changed"
    finally:
        templates["qwen36"].tokenizer.chat_template = own


@pytest.mark.parametrize(
    ("messages", "texts"),
    [
        ([], {}),
        ([row("user", "Hi"), row("assistant", "Ho")], {}),
        ([row("user", "Hi"), row("system", "late"), row("user", "Ho")], {}),
        (QUESTION, {"tool_calls": json.dumps([call("f", "{")])}),
        (QUESTION, {"tool_calls": "[{"}),
        (QUESTION, {"tool_calls": "[{}]"}),
        (QUESTION, {"tools": "{"}),
        (None, {}),
    ],
)
def test_a_conversation_that_the_server_would_refuse_is_refused(
    reason: Any, messages: Any, texts: dict[str, Any]
) -> None:
    given = answered("Blue.", messages=messages, **texts)
    assert reason("qwen36 plain", given) == "unrenderable"


@pytest.mark.parametrize(
    ("chat_template", "expected"),
    [
        (MESSAGES.replace("{{ m.content }}", "{{ loop.length }}{{ m.content }}"), "history_rewritten"),
        (MESSAGES.replace("<|im_end|>\n", "\n"), "no_end_marker"),
        (MESSAGES + "{% if not add_generation_prompt %}Bye{% endif %}", "no_end_marker"),
        (MESSAGES.replace("{{ m.content }}", "{{ m.content[:3] }}"), "content_changed"),
        (MESSAGES.replace("{{ m.content }}", "{{ m.content }} "), "content_changed"),
        (MESSAGES.replace("{{ m.content }}", "{% if m.role != 'user' %}Well: {% endif %}{{ m.content }}"), "content_changed"),
    ],
)  # fmt: skip
def test_a_template_that_changes_what_was_said_is_refused(
    demo_model: Path, chat_template: str, expected: str
) -> None:
    tokenizer = load_tokenizer(demo_model, False)
    tokenizer.chat_template = chat_template
    (found,) = template_ids([answered("Blue.")], make_template(tokenizer, {}))
    assert isinstance(found, UnstableError) and found.reason == expected


def test_ids_that_do_not_give_the_text_back_are_refused(demo_model: Path) -> None:
    """A token that eats the white space after it, as some models' end markers do."""
    from tokenizers import AddedToken

    tokenizer = load_tokenizer(demo_model, False)
    tokenizer.add_tokens([AddedToken("otter", rstrip=True, special=False)])
    template = make_template(tokenizer, {})
    assert isinstance(template_ids([answered("An otter.")], template)[0], Ids)
    (found,) = template_ids([answered("An otter swims.")], template)
    assert isinstance(found, UnstableError) and found.reason == "not_reversible"


def test_what_the_tokenizer_loses_of_the_prompt_is_no_fault_of_the_answer(
    supervised: Any, reason: Any
) -> None:
    unknown = "\x16"  # a byte that SmolLM2's vocabulary lacks
    asked = [row("user", f"Why{unknown}?")]
    assert supervised("smollm2", answered("Blue.", messages=asked)) == "Blue.<|im_end|>"
    assert reason("smollm2", answered(f"Blue{unknown}.")) == "not_reversible"


# System prompts that no message holds


def test_a_default_system_prompt_is_reported_in_its_words(templates: dict[str, Template]) -> None:
    said = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert injected_system(templates["smollm2"]) == said


@pytest.mark.parametrize("name", ["qwen3", "qwen36", "qwen36 plain"])
def test_a_template_that_adds_no_system_prompt_is_told_apart(
    templates: dict[str, Template], name: str
) -> None:
    assert injected_system(templates[name]) == ""
