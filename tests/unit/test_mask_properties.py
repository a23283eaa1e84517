"""Whatever is said in a conversation, under real tokenizers and templates: the mask is exact, or there is no row.

Texts are made of what trips masks over: special tokens spelled out by either side, cut emoji, decomposed accents, line
breaks at the edges, markers of thoughts and calls.
"""

import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebuild.tables import GENERATED
from rebuild.texts.drift import retokenization
from rebuild.texts.rows import with_origin
from rebuild.texts.template_masks import Ids, make_template, template_ids
from rebuild.tokens.chat import UnrenderableError, load_tokenizer, render_prompt, to_chat_messages
from tests.support.conversations import row
from tokenize_shard import check_ids, training_rows

Row = dict[str, Any]

MODELS = ["qwen3", "qwen36", "smollm2"]
SPECIAL = ["<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<|im_end|>\n<|im_start|>user\n"]  # fmt: skip
TRIPPING = [
    *["\n", "\n\n", " ", "  ", "\t", "\r\n", "\u00a0", "\u2028"],
    *["Cafe\u0301", "\u0301", "n\u0303", "\u1112\u1161\u11ab", "\u212b", "\ufb01", "가"],
    *["🦦", "👩‍👩‍👧‍👦", "\ufe0f", "\u202b", "�"],
    *["<|im_", "end|>", "<", "|>", "<think>", "</think>", "<think>\n\n</think>\n\n"],
    *["<tool_call>", "<tool_response>", "</tool_response>", "{{ x }}", "{% raw %}"],
    *["land", "mark", " landmark", "assistant", "system", "12", "345", ".", "x" * 40],
]
WORDS = st.lists(st.sampled_from(["otters", "swim", "in", "the", "12", "é", "🦦,", "\n- kelp", "land"]), min_size=1, max_size=8).map(" ".join)  # fmt: skip


def text_of(*pieces: str) -> st.SearchStrategy[str]:
    fragments = st.sampled_from([*TRIPPING, *pieces]) | st.text(max_size=4)
    return st.lists(fragments, max_size=8).map("".join)


ANYTHING = text_of(*SPECIAL)
HARMLESS = text_of().filter(lambda text: "\ufffd" not in text)
THOUGHTS = st.none() | HARMLESS | HARMLESS.map(str.strip) | ANYTHING
ARGUMENTS = st.sampled_from([{}, {"enable_thinking": False}, {"preserve_thinking": True}])


@st.composite
def conversations(draw: Any, texts: st.SearchStrategy[str] = ANYTHING) -> list[Row]:
    """A history that ends with a question."""
    messages = [row("system", draw(texts))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 2))):
        messages += [row("user", draw(texts))]
        messages += [row("assistant", draw(texts), reasoning_content=draw(st.none() | texts))]
    return [*messages, row("user", draw(texts))]


@st.composite
def answers(draw: Any) -> Row:
    """A row of the generated table that came without ids, as any server or data set may give it."""
    thought, content = draw(THOUGHTS), draw(ANYTHING | HARMLESS | HARMLESS.map(str.strip))
    finish = draw(st.sampled_from(["stop", "length"]))
    cut = finish == "length" or (thought is not None and not content)
    return dict.fromkeys(GENERATED.names) | {
        "sample_id": "a",
        "messages": draw(conversations()),
        "reasoning": thought,
        "content": content,
        "finish_reason": finish,
        "status": "truncated" if cut else "ok",
    }


@pytest.fixture(scope="session")
def tokenizers(qwen3_tokenizer: Path, qwen36_tokenizer: Path, demo_model: Path) -> dict[str, Any]:
    folders = zip(MODELS, (qwen3_tokenizer, qwen36_tokenizer, demo_model), strict=True)
    return {name: load_tokenizer(folder, False) for name, folder in folders}


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def prompt_of(tokenizer: Any, messages: list[Row], arguments: dict[str, Any]) -> list[int]:
    return render_prompt(tokenizer, to_chat_messages(messages), None, arguments)


def check_said(said: str, answer: Row, prompt: str) -> None:
    """Hold the text of the supervised tokens against the answer: thought, content, and nothing else but white space."""
    thought, content = answer["reasoning"], nfc(answer["content"])
    if thought is None:
        assert said == content
        return
    if not prompt.rstrip().endswith("<think>"):
        assert said.startswith("<think>")
        said = said.removeprefix("<think>")
    if content or answer["finish_reason"] == "stop":
        assert said.endswith(content)
        said = said[: len(said) - len(content)].rstrip()
        assert said.endswith("</think>")
        said = said.removesuffix("</think>")
    assert said.strip() == nfc(thought).strip()


@pytest.mark.parametrize("model", MODELS)
@settings(deadline=None, max_examples=150)
@given(answer=answers(), arguments=ARGUMENTS)
def test_a_row_by_the_template_is_exact_or_refused(
    tokenizers: dict[str, Any], model: str, answer: Row, arguments: dict[str, Any]
) -> None:
    tokenizer = tokenizers[model]
    template = make_template(tokenizer, arguments)
    (ids,) = template_ids([answer], template)
    texts = (answer["reasoning"] or "") + "\n" + answer["content"]
    if not isinstance(ids, Ids):
        assert ids.detail
        return
    assert ids.prompt == prompt_of(tokenizer, answer["messages"], arguments)
    assert not any(special in texts for special in ("\ufffd", "<|im_end|>", "<|im_start|>"))
    said = template.decode(ids.response)
    if answer["finish_reason"] == "stop":
        assert ids.response[-1] == tokenizer.eos_token_id
        said = said.removesuffix("<|im_end|>")
    assert "<|im_end|>" not in said
    check_said(nfc(said), answer, template.decode(ids.prompt))


@pytest.mark.parametrize("model", MODELS)
@settings(deadline=None, max_examples=60)
@given(
    messages=conversations(), thought=WORDS, content=WORDS, finish=st.sampled_from(["stop", "length"])
)  # fmt: skip
def test_plain_answers_are_never_refused_whatever_was_asked(
    tokenizers: dict[str, Any], model: str, messages: list[Row], thought: str, content: str, finish: str
) -> None:  # fmt: skip
    answer = dict.fromkeys(GENERATED.names) | {
        "messages": messages,
        "reasoning": None if model == "smollm2" else thought.strip(),
        "content": content.strip(),
        "finish_reason": finish,
        "status": "ok" if finish == "stop" else "truncated",
    }
    (ids,) = template_ids([answer], make_template(tokenizers[model], {}))
    assert isinstance(ids, Ids), ids


def sampled_in_pieces(tokenizer: Any, pieces: list[str], cut: int, stopped: bool) -> list[int]:
    """Return ids as an engine may sample them: pieces that re-tokenizing would merge, the last one cut, special ones split."""
    ids = [token for piece in pieces for token in spelled(tokenizer, piece)]
    return ids[: len(ids) - cut] + ([tokenizer.eos_token_id] if stopped else [])


def spelled(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text, special tokens in it written out in letters."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return ids


@pytest.mark.parametrize("model", MODELS)
@settings(deadline=None, max_examples=60)
@given(
    messages=conversations(),
    pieces=st.lists(st.sampled_from(TRIPPING + SPECIAL), min_size=1, max_size=8),
    cut=st.integers(0, 2),
    stopped=st.booleans(),
    arguments=ARGUMENTS,
)
def test_the_engines_ids_are_kept_and_supervised_exactly_whatever_they_say(
    tokenizers: dict[str, Any],
    model: str,
    messages: list[Row],
    pieces: list[str],
    cut: int,
    stopped: bool,
    arguments: dict[str, Any],
) -> None:
    tokenizer = tokenizers[model]
    response = sampled_in_pieces(tokenizer, pieces, cut, stopped)
    try:
        prompt = prompt_of(tokenizer, messages, arguments)
    except UnrenderableError:
        return  # such a prompt is never asked
    answer = dict.fromkeys(GENERATED.names) | {
        "sample_id": "a",
        "messages": messages,
        "prompt_token_ids": prompt,
        "response_token_ids": response,
        "content": tokenizer.decode(response, skip_special_tokens=True),
        "finish_reason": "stop" if stopped else "length",
        "status": "ok" if stopped else "truncated",
        "completion_tokens": len(response),
    }
    batch = with_origin(pa.RecordBatch.from_pylist([answer], schema=GENERATED))
    check_ids(batch, Path("generated.parquet"))
    (made,) = training_rows(batch, None).to_pylist()
    assert made["input_ids"] == prompt + response
    assert made["loss_mask"] == [0] * len(prompt) + [1] * len(response)
    assert (made["seq_len"], made["loss_tokens"]) == (len(prompt) + len(response), len(response))
    assert made["mask_origin"] == "engine"
    told = retokenization([answer], tokenizer, arguments)
    (found,) = template_ids([answer], make_template(tokenizer, arguments))
    same = isinstance(found, Ids) and found == (prompt, response)
    assert told["differing"] == (0 if same else 1)


@pytest.mark.parametrize("model", ["qwen3", "qwen36"])
@settings(deadline=None, max_examples=40)
@given(messages=conversations(WORDS), thought=WORDS, content=WORDS)
def test_what_was_sampled_as_it_is_written_comes_back_as_the_same_ids(
    tokenizers: dict[str, Any], model: str, messages: list[Row], thought: str, content: str
) -> None:
    tokenizer = tokenizers[model]
    opening = "<think>\n" if model == "qwen3" else ""
    thought, content = thought.strip(), content.strip()
    said = f"{opening}{thought}\n</think>\n\n{content}<|im_end|>"
    answer = {"sample_id": "a", "messages": messages, "tools": None, "tool_calls": None}
    answer |= {"reasoning": thought, "content": content, "finish_reason": "stop", "status": "ok"}
    answer["prompt_token_ids"] = prompt_of(tokenizer, messages, {})
    answer["response_token_ids"] = tokenizer.encode(said, add_special_tokens=False)
    told = retokenization([answer], tokenizer, {})
    assert told == {"rows": 1, "differing": 0, "examples": []}
