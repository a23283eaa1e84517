"""What the audit needs to know of generated rows: their texts judged, and cut to what a person reads as evidence."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rebuild.audit.facts import answer_kind
from rebuild.audit.id_features import row_hashes
from rebuild.audit.near_duplicates import Sketches, sketch_texts
from rebuild.audit.sample_facts import one_array, text_columns
from rebuild.audit.target import Target
from rebuild.audit.writing_systems import other_script
from rebuild.tables import iter_rows
from rebuild.tokens.masks import flat_values, list_lengths, row_starts

TEXTS = ["sample_id", "prompt_id", "source", "status", "finish_reason", "error"]
USAGE = ["turn", "prompt_tokens", "completion_tokens", "reasoning_tokens"]  # -1 where not known
COLUMNS = [
    *TEXTS,
    *USAGE,
    "messages",
    "tools",
    "prompt_token_ids",
    "response_token_ids",
    "reasoning",
    "content",
    "tool_calls",
]
EXCERPT = 80  # characters
SHOWN = 600  # characters of a text in an example to read
ANSWERED = ("ok", "truncated", "tool_calls")
UNSHOWABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """The prompts of a shard: of each, in order, its number of user turns, and hashes of what its people say.

    `sketches` are those of the user's texts (`near_duplicates`), in the same order.
    """

    user_turns: dict[str, int]
    voices: dict[str, list[int]]
    sketches: Sketches


def read_asked(prompts: Path) -> Asked:
    """Reduce a prompts file to what its answers are held against."""
    user_turns: dict[str, int] = {}
    voices: dict[str, list[int]] = {}
    texts: list[str] = []
    for row in iter_rows(prompts, ["prompt_id", "messages"]):
        users = [message for message in row["messages"] if message["role"] == "user"]
        user_turns[row["prompt_id"]] = len(users)
        voices[row["prompt_id"]] = people(row["messages"])
        texts.append("\n".join(message["content"] or "" for message in users))
    return Asked(user_turns, voices, sketch_texts(texts))


def people(messages: list[Row]) -> list[int]:
    """Return a hash of each message that neither the model nor a tool says."""
    return [
        hash((m["role"], m["content"])) for m in messages if m["role"] not in ("assistant", "tool")
    ]


def answer_facts(batch: Any, asked: Asked, target: Target | None) -> pd.DataFrame:
    """Return one row for each row of `batch` (columns COLUMNS of `tables.GENERATED`).

    Those of TEXTS and USAGE, and: `prompt_key` and `response_key`, hashes of the engine's ids; `user_turn` that it
    answers, from 1; `kind` (`facts.answer_kind`); `excerpt` of the answer; `asked_otherwise` than the prompt asks;
    `other_script` than the question's, in words. With a target also `difference` of the prompt ids from the template's,
    in words; `says_otherwise`: ids and texts differ; `stray_marker`; `thinks`: the answer should begin with a thought;
    `thought_missing`. Words are "" where nothing is wrong.
    """
    rows = batch.to_pylist()
    facts = text_columns(batch, TEXTS)
    for name in USAGE:
        facts[name] = batch[name].fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    for name in ["prompt", "response"]:
        ids = one_array(batch[f"{name}_token_ids"])
        facts[f"{name}_key"] = row_hashes(flat_values(ids), row_starts(list_lengths(ids)))
    facts = pd.concat([facts, frame([judge_row(row, asked) for row in rows], JUDGED)], axis=1)
    if target is None:
        return facts
    against = frame([judge_against(row, target) for row in rows], JUDGED_AGAINST)
    return pd.concat([facts, against], axis=1)


def frame(rows: list[tuple[Any, ...]], types: dict[str, str]) -> pd.DataFrame:
    """Return rows as a frame with columns of these types, even where there are no rows to tell them from."""
    return pd.DataFrame(rows, columns=list(types)).astype(types)


JUDGED = {
    "user_turn": "int64",
    "kind": "object",
    "excerpt": "object",
    "asked_otherwise": "bool",
    "other_script": "object",
}


def judge_row(row: Row, asked: Asked) -> tuple[int, str, str, bool, str]:
    """Return the values of JUDGED."""
    said = row["content"] or ""
    kind = answer_kind(
        row["status"],
        row["reasoning"],
        row["content"],
        row["tool_calls"],
        -1 if row["completion_tokens"] is None else row["completion_tokens"],
    )
    spoken = people(row["messages"] or [])
    due = asked.voices.get(
        row["prompt_id"], spoken
    )  # rows of unknown prompts are the balance's business
    question = last_question(row["messages"] or [])
    other = other_script(question, said) if row["status"] in ANSWERED else None
    return (
        sum(message["role"] == "user" for message in row["messages"] or []),
        kind,
        repr((said or row["reasoning"] or "")[:EXCERPT]),
        spoken != due[: len(spoken)],
        other or "",
    )


JUDGED_AGAINST = {
    "difference": "object",
    "says_otherwise": "bool",
    "stray_marker": "object",
    "thinks": "bool",
    "thought_missing": "bool",
}


def judge_against(row: Row, target: Target) -> tuple[str, bool, str, bool, bool]:
    """Return the values of JUDGED_AGAINST; rows without answers or without the engine's ids have nothing wrong."""
    if row["status"] not in ANSWERED:
        return "", False, "", False, False
    thinks = target.thinks(row)
    missing = thinks and row["status"] == "ok" and not (row["reasoning"] or "").strip()
    if not row["prompt_token_ids"] or not row["response_token_ids"]:
        return "", False, "", thinks, missing
    return (
        target.difference(row),
        target.says_otherwise(row),
        target.stray_marker(row),
        thinks,
        missing,
    )


def last_question(messages: list[Row]) -> str:
    """Return what the user says last."""
    return next((m["content"] or "" for m in reversed(messages) if m["role"] == "user"), "")


def example(row: Row) -> Row:
    """Return what a person reads of a generated row, its texts cut and free of control characters."""
    return {
        "sample_id": row["sample_id"],
        "source": row["source"],
        "status": row["status"],
        "prompt": showable(last_question(row["messages"] or [])),
        "reasoning": showable(row["reasoning"]),
        "answer": showable(row["content"] or row["tool_calls"] or row["error"]),
    }


def showable(text: str | None) -> str | None:
    """Return the beginning of a text without characters that steer terminals or the direction of writing."""
    if text is None:
        return None
    shown = UNSHOWABLE.sub("�", text[:SHOWN].encode("utf-8", "replace").decode())
    return shown if len(text) <= SHOWN else f"{shown} …"
