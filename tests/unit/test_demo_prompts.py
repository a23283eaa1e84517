"""What the demo's prompts promise: small, varied, every one accepted."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from rebuild.prompts.rows_to_prompts import Prompt, count_user_turns, to_prompt

DEMO = Path(__file__).parents[2] / "config/demo_prompts.jsonl"


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def prompts(rows: list[dict]) -> list[Prompt]:
    return [to_prompt(row, DEMO.name) for row in rows]


def text_of(prompt: Prompt) -> str:
    return "\n".join(message["content"] for message in prompt["messages"])


def test_there_are_64_prompts_with_ids_and_conversations_of_their_own(prompts):
    assert len(prompts) == 64
    assert len({prompt["prompt_id"] for prompt in prompts}) == 64
    assert len({text_of(prompt) for prompt in prompts}) == 64


def test_they_come_from_about_eight_sources(prompts):
    sources = Counter(prompt["source"] for prompt in prompts)
    assert len(sources) == 8
    assert all(source.startswith("demo/") for source in sources)


def test_every_accepted_shape_occurs(rows):
    shapes = Counter(key for row in rows for key in row if key not in ("id", "source", "tools"))
    assert set(shapes) == {"messages", "conversations", "prompt", "turns"}


def test_a_dozen_have_two_to_four_user_turns_and_the_others_one(prompts):
    turns = Counter(count_user_turns(prompt) for prompt in prompts)
    assert set(turns) == {1, 2, 3, 4}
    assert turns[2] + turns[3] + turns[4] == 12


def test_some_bring_answers_of_another_model_that_are_dropped(rows, prompts):
    given = [message for row in rows for message in row.get("messages", [])]
    assert any(message["role"] == "assistant" for message in given)
    kept = {message["role"] for prompt in prompts for message in prompt["messages"]}
    assert kept == {"system", "user"}


@pytest.mark.parametrize(
    "script", ["ARABIC", "HEBREW", "DEVANAGARI", "CJK", "HIRAGANA", "CYRILLIC"]
)
def test_scripts_beside_latin_occur(prompts, script):
    names = {unicodedata.name(char, "") for prompt in prompts for char in text_of(prompt)}
    assert any(name.startswith(script) for name in names)


@pytest.mark.parametrize("language", ["german", "french", "spanish", "portuguese"])
def test_languages_in_latin_script_occur(prompts, language):
    assert any(prompt["prompt_id"].startswith(language) for prompt in prompts)


def test_emoji_occur_in_several(prompts):
    emoji = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf]")
    assert sum(bool(emoji.search(text_of(prompt))) for prompt in prompts) >= 4


def test_two_carry_tools(prompts):
    tools = [json.loads(prompt["tools"]) for prompt in prompts if prompt["tools"]]
    assert [len(functions) for functions in tools] == [1, 2]


def test_exactly_one_quotes_special_tokens(prompts):
    quoting = [prompt for prompt in prompts if "<|im_end|>" in text_of(prompt)]
    assert [prompt["prompt_id"] for prompt in quoting] == ["template-01"]
    assert "</think>" in text_of(quoting[0])


def test_they_are_short_so_that_the_demo_is(prompts):
    assert max(len(text_of(prompt)) for prompt in prompts) < 400
