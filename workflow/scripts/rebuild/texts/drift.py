"""How many rows would get other ids if their texts were tokenized anew: what a trainer that re-renders would learn from.

Only a report: rows keep the engine's ids.
"""

import json
from typing import Any

from rebuild.generate.conversation import answer_message
from rebuild.texts.template_checks import Row, UnstableError
from rebuild.texts.template_masks import Ids, Template, make_template, template_ids
from rebuild.tokens.chat import UnrenderableError, to_chat_messages

EXAMPLES = 5
SHOWN_TOKENS = 6


def retokenization(
    rows: list[Row],
    tokenizer: Any,
    template_kwargs: dict[str, Any],
    *,
    eos_token_ids: list[int] | None = None,
    examples: int = EXAMPLES,
) -> dict[str, Any]:
    """Return how many rows of a generated table, all with the engine's ids, differ from what re-rendering gives.

    A row that the template does not render as it was differs too. An example has the place of the first difference
    (`at`, in tokens from the beginning of the prompt) and the tokens there as text, the engine's and the re-rendered.
    """
    template = make_template(tokenizer, template_kwargs, eos_token_ids)
    differing = 0
    shown: list[dict[str, Any]] = []
    for row, found in zip(rows, template_ids(rows, template), strict=True):
        engine = [*row["prompt_token_ids"], *row["response_token_ids"]]
        if isinstance(found, Ids) and found.prompt + found.response == engine:
            continue
        differing += 1
        if len(shown) < examples:
            shown.append(example(row, engine, found, template))
    return {"rows": len(rows), "differing": differing, "examples": shown}


def example(
    row: Row, engine: list[int], found: Ids | UnstableError, template: Template
) -> dict[str, Any]:
    """Return where a row's ids part from the re-rendered ones, or why the template has none for it."""
    sample = {"sample_id": row["sample_id"]}
    if isinstance(found, UnstableError) and found.reason == "unrenderable":
        return sample | {"at": 0, "engine": words(engine, 0, template), "rendered": str(found)}
    rendered = found.prompt + found.response if isinstance(found, Ids) else whole_ids(row, template)
    at = first_place(engine, rendered)
    return sample | {
        "at": at,
        "engine": words(engine, at, template),
        "rendered": words(rendered, at, template),
    }


def whole_ids(row: Row, template: Template) -> list[int]:
    """Return the ids of the whole conversation as the template renders it, whatever it makes of the answer."""
    messages = to_chat_messages([*row["messages"], answer_message(row)])
    tools = json.loads(row["tools"]) if row["tools"] else None
    try:
        return template.encode([template.render(messages, tools, prompt=False)])[0]
    except UnrenderableError:
        return []


def first_place(one: list[int], other: list[int]) -> int:
    """Return the first place where two lists differ, the length of the shorter if one begins with it."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def words(ids: list[int], at: int, template: Template) -> str:
    """Return the tokens from a place on as text, each in quotes so that their borders show."""
    tokens = (template.decode([token]) for token in ids[at : at + SHOWN_TOKENS])
    return " ".join(json.dumps(token, ensure_ascii=False) for token in tokens)
