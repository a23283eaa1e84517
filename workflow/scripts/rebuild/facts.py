"""The facts that the audit judges: one short record per row, without ids and full texts."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

HANDFUL = 12  # tokens; an empty think block, "OK." and the stop token are 7
ANSWERED = ("ok", "truncated", "tool_calls")
STATUSES = (*ANSWERED, "skipped", "error")
QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Facts:
    """What is known of a set of rows.

    `prompts` maps each prompt, in order, to its number of user turns. `answers` has one row per
    generated row: sample_id, prompt_id, source, status, finish_reason, error, prompt_tokens and
    completion_tokens (-1 if not reported), user_turn (the one it answers, from 1), kind (see
    `answer_kind`), excerpt. `samples` has one row per tokenized row: sample_id, finish_reason,
    mask_origin, seq_len, loss_tokens, ids_len, ids_bad (negative ones) and the columns of
    `masks.mask_facts`. `counts` is what tokenizing wrote down: rows in, out, and dropped by reason.
    `origins` are pairs that must be equal: what a file says it was made from, and what that is.
    """

    prompts: dict[str, int]
    answers: pd.DataFrame
    samples: pd.DataFrame
    counts: dict[str, Any]
    origins: dict[str, tuple[str, str]]
    max_length: int | None


def answered_rows(facts: Facts) -> pd.DataFrame:
    """Return the generated rows that hold an answer, whole or cut."""
    return facts.answers[facts.answers["status"].isin(ANSWERED)]


def answer_kind(
    status: str,
    reasoning: str | None,
    content: str | None,
    tool_calls: str | None,
    completion_tokens: int,
) -> str:
    r"""Return what a finished answer amounts to: "said", "empty", "trivial", or "" where that is not judged.

    Empty: nothing is said after the thought, or only a handful of tokens after a thought that is
    there but blank, as in `<think>\n\n</think>\n\nOK.`. Trivial: a handful of tokens without a
    thought. Truncated answers are not judged: cut in their thought, they had no chance to speak.
    """
    if status not in ("ok", "tool_calls"):
        return ""
    if tool_calls and tool_calls != "[]":
        return "said"
    thought, said = split_thought(reasoning, content)
    few = 0 <= completion_tokens <= HANDFUL
    if not said.strip() or (few and thought is not None and not thought.strip()):
        return "empty"
    return "trivial" if few and thought is None else "said"


def split_thought(reasoning: str | None, content: str | None) -> tuple[str | None, str]:
    """Return the thought (None if there is none) and what is said after it.

    The thought is in `reasoning` (which is "" for a blank one), or ahead of the first `</think>` of `content` (its opening tag
    may have been in the prompt). A thought that is opened and never closed leaves nothing said.
    """
    head, closed, tail = (content or "").partition("</think>")
    if closed:
        return (reasoning or "") + head.replace("<think>", "", 1), tail
    if head.lstrip().startswith("<think>"):
        return head.replace("<think>", "", 1), ""
    return reasoning, head


def count_rows(facts: Facts) -> dict[str, Any]:
    """Return how many prompts there are, and how many rows generated (in all and by status), tokenized and dropped."""
    status = facts.answers["status"].value_counts()
    return {
        "prompts": len(facts.prompts),
        "generated": len(facts.answers),
        **{name: int(status.get(name, 0)) for name in STATUSES},
        "tokenized": len(facts.samples),
        "dropped": facts.counts.get("dropped", {}),
    }


def distribution(facts: Facts) -> dict[str, Any]:
    """Return how the supervised tokens, finish reasons and sources are distributed."""
    sums = facts.samples["mask_sum"]
    return {
        "mask_sum": {
            "rows": len(sums),
            "total": int(sums.sum()),
            "quantiles": {f"{q:g}": float(sums.quantile(q)) for q in QUANTILES if len(sums)},
            "most_frequent": most_frequent(sums, 10),
        },
        "finish_reason": tally(facts.answers["finish_reason"]),
        "source": tally(facts.answers["source"]),
    }


def most_frequent(values: "pd.Series[int]", count: int) -> list[dict[str, int]]:
    """Return the `count` most frequent values, each with its number of rows; ties by value."""
    ranked = sorted(values.value_counts().items(), key=lambda item: (-item[1], item[0]))
    return [{"value": int(str(value)), "rows": int(rows)} for value, rows in ranked[:count]]


def tally(values: "pd.Series[str]") -> dict[str, int]:
    """Return the number of rows of every value, by name; missing ones as "none"."""
    return {
        str(name): int(n) for name, n in values.fillna("none").value_counts().sort_index().items()
    }
