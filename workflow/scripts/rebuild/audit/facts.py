"""The facts that the audit judges: one short record per row, without ids and full texts."""

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from rebuild.audit.near_duplicates import Sketches

HANDFUL = 12  # tokens; an empty think block, "OK." and the stop token are 7
ANSWERED = ("ok", "truncated", "tool_calls")
STATUSES = (*ANSWERED, "skipped", "error")


@dataclass(frozen=True)
class Facts:
    """What is known of a set of rows.

    `prompts` maps each prompt, in order, to its number of user turns, and `sketches` are of what they ask, in the same
    order (`near_duplicates`). `answers` has one row per generated row (`answer_facts`), `samples` one per training row
    (`sample_facts`). `counts` is what tokenizing wrote down: rows in, out, and dropped by reason. `origins` are pairs
    that must be equal: what a file says it was made from, and what that is. `stop_ids` end an answer. What a data set
    from elsewhere does not have is empty, None, or lacks its columns; the checks that need it are then not judged.
    """

    samples: pd.DataFrame
    answers: pd.DataFrame = field(default_factory=pd.DataFrame)
    prompts: dict[str, int] = field(default_factory=dict)
    sketches: Sketches | None = None
    counts: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)
    max_length: int | None = None
    stop_ids: frozenset[int] | None = None


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
