"""The retokenization report: which rows re-rendering would give other ids, and where."""

from pathlib import Path
from typing import Any

import pytest

from rebuild.texts.drift import retokenization
from rebuild.tokens.chat import load_tokenizer, render_prompt, to_chat_messages
from tests.support.conversations import row

QUESTION = [row("user", "Where do otters live?")]


@pytest.fixture(scope="module")
def tokenizer(qwen3_tokenizer: Path) -> Any:
    return load_tokenizer(qwen3_tokenizer, trust_remote_code=False)


def answered(tokenizer: Any, name: str, response: list[int], **texts: Any) -> dict[str, Any]:
    """Return a row of the generated table with the engine's ids, thinking switched off."""
    kwargs = {"enable_thinking": False}
    return {
        "sample_id": name,
        "messages": QUESTION,
        "tools": None,
        "prompt_token_ids": render_prompt(tokenizer, to_chat_messages(QUESTION), None, kwargs),
        "response_token_ids": response,
        "reasoning": None,
        "content": tokenizer.decode(response, skip_special_tokens=True),
        "tool_calls": None,
        "finish_reason": "stop",
        "status": "ok",
    } | texts


def report(tokenizer: Any, rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    return retokenization(rows, tokenizer, {"enable_thinking": False}, **settings)


def pieces(tokenizer: Any, *texts: str) -> list[int]:
    """Return the ids of texts that are tokenized apart."""
    return [token for text in texts for token in tokenizer.encode(text)]


def test_rows_that_tokenize_to_their_own_ids_do_not_differ(tokenizer: Any) -> None:
    rows = [
        answered(tokenizer, name, pieces(tokenizer, f"{text}<|im_end|>"))
        for name, text in {"a": "By rivers.", "b": "Sea 🦦, too.\n\n- kelp"}.items()
    ]
    assert report(tokenizer, rows) == {"rows": 2, "differing": 0, "examples": []}


def test_tokens_that_were_sampled_in_other_pieces_are_shown_as_text_with_their_place(
    tokenizer: Any,
) -> None:
    plain = answered(tokenizer, "plain", pieces(tokenizer, "By rivers.<|im_end|>"))
    split = answered(tokenizer, "split", pieces(tokenizer, "A land", "mark", "<|im_end|>"))
    told = report(tokenizer, [plain, split])
    (shown,) = told.pop("examples")
    assert told == {"rows": 2, "differing": 1}
    assert shown == {
        "sample_id": "split",
        "at": len(split["prompt_token_ids"]) + 1,
        "engine": '" land" "mark" "<|im_end|>"',
        "rendered": '" landmark" "<|im_end|>"',
    }


def test_a_row_that_the_template_changes_differs_where_it_does(tokenizer: Any) -> None:
    spaced = answered(tokenizer, "spaced", pieces(tokenizer, "\n\nBy rivers.<|im_end|>"))
    (shown,) = report(tokenizer, [spaced])["examples"]
    assert shown["at"] == len(spaced["prompt_token_ids"])
    assert shown["engine"].startswith('"\\n\\n" "By"')
    assert shown["rendered"].startswith('"By" " rivers"')


def test_a_row_that_cannot_be_rendered_differs_with_the_reason(tokenizer: Any) -> None:
    calls = '[{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}]'
    broken = answered(tokenizer, "broken", pieces(tokenizer, "x<|im_end|>"), tool_calls=calls)
    (shown,) = report(tokenizer, [broken])["examples"]
    assert (shown["sample_id"], shown["at"]) == ("broken", 0)
    assert shown["rendered"].startswith("unrenderable: ") and "JSONDecodeError" in shown["rendered"]


def test_no_more_examples_are_kept_than_asked_for(tokenizer: Any) -> None:
    rows = [
        answered(tokenizer, str(number), pieces(tokenizer, " land", "mark", "<|im_end|>"))
        for number in range(9)
    ]
    told = report(tokenizer, rows, examples=2)
    assert told["differing"] == 9
    assert [shown["sample_id"] for shown in told["examples"]] == ["0", "1"]


def test_no_rows_are_no_report_of_any_difference(tokenizer: Any) -> None:
    assert report(tokenizer, []) == {"rows": 0, "differing": 0, "examples": []}
