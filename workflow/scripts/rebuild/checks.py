"""The checks of the audit: each looks at the facts about a set of rows and says what it found.

Not the judge: limits are applied in `rebuild.verdict`. Nothing here reads or writes a file, so the
same checks serve a shard, a whole run, or a data set from elsewhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rebuild.balance import Case, contradictions
from rebuild.chance import allowed_count
from rebuild.facts import HANDFUL, Facts, answered_rows, most_frequent

CASES = 10  # named as evidence
CASE_CHARS = 200
UNREACHED = "conversation_ended"


@dataclass(frozen=True)
class Finding:
    """What a check found: `count` of `of` rows are affected, said in one sentence, the first ones as `cases`.

    A median has its `value` too, and `bound`, which the median of the source does not exceed.
    """

    count: int
    of: int
    seen: str
    cases: list[Case]
    value: float = math.nan
    bound: float = math.inf


@dataclass(frozen=True)
class Check:
    """One check: its name in `audit.limits`, what is limited, the limit by default, and why it matters.

    "rows" and "share" are upper limits on the affected rows, "median" is a lower one on the value.
    """

    name: str
    kind: Literal["rows", "share", "median"]
    default: float
    why: str
    find: Callable[[Facts], Finding]


def affected(rows: pd.DataFrame, of: int, what: str, template: str) -> Finding:
    """Return the finding that `rows` are `what`; `template` says of each, from its columns, what was seen."""
    records = rows.head(CASES).to_dict("records")
    texts = [template.format_map({str(k): v for k, v in row.items()}) for row in records]
    names = [str(row["sample_id"]) for row in records]
    cases = list(zip(names, (text[:CASE_CHARS] for text in texts), strict=True))
    return Finding(len(rows), of, f"{len(rows)} of {of} rows {what}", cases)


def find_unbalanced(facts: Facts) -> Finding:
    """Every turn of every prompt has one row, in order, and every row is tokenized or accounted for."""
    cases = contradictions(facts)
    prompts, answers, samples = len(facts.prompts), len(facts.answers), len(facts.samples)
    seen = f"{len(cases)} contradictions between {prompts} prompts, {answers} answers and {samples} training rows"
    return Finding(len(cases), len(facts.answers), seen, cases[:CASES])


def find_errors(facts: Facts) -> Finding:
    """Rows that generation gave up."""
    rows = facts.answers[facts.answers["status"] == "error"]
    return affected(rows, len(facts.answers), "were given up", "{error}")


def find_skipped(facts: Facts) -> Finding:
    """Rows that could not be asked, being too long or invalid."""
    asked = facts.answers[~is_unreached(facts.answers)]
    rows = asked[asked["status"] == "skipped"]
    return affected(rows, len(asked), "were skipped", "{error}")


def find_unreached(facts: Facts) -> Finding:
    """Rows that were never asked because their conversation had ended before."""
    rows = facts.answers[is_unreached(facts.answers)]
    return affected(rows, len(facts.answers), "were out of reach", "{error}")


def is_unreached(answers: pd.DataFrame) -> "pd.Series[bool]":
    """Return for each row whether an earlier turn of its conversation put it out of reach."""
    ended = answers["error"].fillna("").str.startswith(UNREACHED)
    return (answers["status"] == "skipped") & ended.astype(bool)


def find_truncated(facts: Facts) -> Finding:
    """Answers that reached the token limit, or stopped without closing their thought."""
    answered = answered_rows(facts)
    rows = answered[(answered["status"] == "truncated") | (answered["finish_reason"] == "length")]
    template = "{completion_tokens} tokens, finish_reason {finish_reason}"
    return affected(rows, len(answered), "are cut or never end their thought", template)


def find_dropped(facts: Facts) -> Finding:
    """Answers without a training row (truncated ones that the config leaves out are not counted)."""
    answered = answered_rows(facts)
    if facts.counts.get("dropped", {}).get("truncated"):
        answered = answered[answered["status"] != "truncated"]
    rows = answered[~answered["sample_id"].isin(facts.samples["sample_id"])]
    template = "{prompt_tokens} prompt + {completion_tokens} answer tokens"
    return affected(rows, len(answered), "left no training row", template)


def find_empty_answers(facts: Facts) -> Finding:
    """Finished answers that say nothing."""
    judged = facts.answers[facts.answers["kind"] != ""]
    rows = judged[judged["kind"] == "empty"]
    return affected(rows, len(judged), "have an empty answer", "answer {excerpt}")


def find_trivial_answers(facts: Facts) -> Finding:
    """Finished answers of a handful of tokens, without a thought."""
    judged = facts.answers[facts.answers["kind"] != ""]
    rows = judged[judged["kind"] == "trivial"]
    what = f"have an answer of at most {HANDFUL} tokens and no thought"
    return affected(rows, len(judged), what, "answer {excerpt}")


def find_mask_sum_mode(facts: Facts) -> Finding:
    """Rows with the most frequent number of supervised tokens, among those that are as long as they wanted to be.

    Truncated rows and rows cut by `max_length` owe their length to a setting; truncation has a check of its own.
    """
    longest = math.inf if facts.max_length is None else facts.max_length
    samples = facts.samples
    finished = samples[(samples["finish_reason"] != "length") & (samples["seq_len"] < longest)]
    mode = most_frequent(finished["mask_sum"], 1)[0]["value"] if len(finished) else 0
    excerpts = facts.answers.drop_duplicates("sample_id")[["sample_id", "excerpt"]]
    rows = finished[finished["mask_sum"] == mode].merge(excerpts, on="sample_id", how="left")
    what = f"that nothing cut short have exactly {mode} supervised tokens"
    return affected(rows, len(finished), what, "{mask_sum} supervised tokens, answer {excerpt}")


def find_usage_mismatch(facts: Facts) -> Finding:
    """Masks that are not, token for token, what the engine says that it was given and sampled.

    The ones begin right after the engine's prompt tokens, are as many as its completion tokens less
    what `max_length` cut off, and reach to the end of the row.
    """
    usage = facts.answers.drop_duplicates("sample_id")
    usage = usage[["sample_id", "prompt_tokens", "completion_tokens"]]
    samples = facts.samples[facts.samples["mask_origin"] == "engine"]
    rows = samples.merge(usage, on="sample_id", how="inner")
    end = (rows["prompt_tokens"] + rows["completion_tokens"]).clip(upper=facts.max_length)
    wrong = rows[
        (rows["mask_first"] != rows["prompt_tokens"])
        | (rows["mask_sum"] != end - rows["prompt_tokens"])
        | (rows["seq_len"] != end)
    ]
    template = (
        "{mask_sum} supervised tokens from place {mask_first} on, {seq_len} in all; "
        "the engine counts {prompt_tokens} prompt + {completion_tokens} answer tokens"
    )
    return affected(wrong, len(rows), "have another mask than the engine's usage says", template)


def find_malformed(facts: Facts) -> Finding:
    """Rows whose lengths contradict each other, or whose ids or mask hold impossible values."""
    rows = facts.samples
    longest = math.inf if facts.max_length is None else facts.max_length
    wrong = rows[
        (rows["seq_len"] < 1)
        | (rows["seq_len"] != rows["ids_len"])
        | (rows["seq_len"] != rows["mask_len"])
        | (rows["loss_tokens"] != rows["mask_sum"])
        | (rows["seq_len"] > longest)
        | (rows["mask_odd"] > 0)
        | (rows["ids_bad"] > 0)
    ]
    template = (
        "seq_len {seq_len}, {ids_len} ids ({ids_bad} of them negative), {mask_len} mask entries "
        "({mask_odd} neither 0 nor 1), loss_tokens {loss_tokens}, mask sum {mask_sum}"
    )
    return affected(wrong, len(rows), "contradict themselves", template)


def find_median_loss_tokens(facts: Facts) -> Finding:
    """The median number of supervised tokens, with the shortest rows."""
    rows = facts.samples
    if rows.empty:
        return Finding(0, 0, "no training rows", [])
    median = float(rows["mask_sum"].median())
    shortest = rows.sort_values("mask_sum", kind="stable").head(CASES)
    cases = affected(shortest, len(rows), "", "{mask_sum} supervised tokens of {seq_len}").cases
    seen = f"half of {len(rows)} rows have {median:g} supervised tokens or fewer"
    bound = median_bound(rows["mask_sum"].to_numpy())
    return Finding(int((rows["mask_sum"] < median).sum()), len(rows), seen, cases, median, bound)


def median_bound(values: NDArray[Any]) -> float:
    """Return what the median that `values` were drawn from does not exceed, but for chance.

    The distribution-free upper bound by order statistics (sign test); infinite for fewer than 10 values.
    """
    below = allowed_count(0.5, len(values))
    return float(np.sort(values)[below]) if below < len(values) else math.inf


CHECKS = (
    Check(
        "unbalanced_rows",
        "rows",
        0,
        "A prompt that is lost, repeated or answered in another's place makes every later count wrong, "
        "and nothing downstream would notice.",
        find_unbalanced,
    ),
    Check(
        "malformed_rows",
        "rows",
        0,
        "Trainers read ids and mask side by side: lengths that differ or values that cannot be "
        "stop the training, or shift what is learnt.",
        find_malformed,
    ),
    Check(
        "usage_mismatch_rows",
        "rows",
        0,
        "The engine counts what it was given and what it sampled: a mask that differs supervises "
        "tokens that the model never said, or leaves out some that it did.",
        find_usage_mismatch,
    ),
    Check(
        "mask_sum_mode_share",
        "share",
        0.1,
        "Real answers differ in length: one length in many rows means one canned answer, which is how "
        "a set of 87 % empty answers looks before its hidden states are paid for.",
        find_mask_sum_mode,
    ),
    Check(
        "empty_answer_share",
        "share",
        0.01,
        "An answer that says nothing teaches the drafter to draft nothing; more than a stray one "
        "means that template, parser and sampling do not fit the model.",
        find_empty_answers,
    ),
    Check(
        "trivial_answer_share",
        "share",
        0.1,
        "An answer of a handful of tokens without a thought fills less than one block of a drafter; "
        "many of them are how a model looks that refuses, or skips its thinking.",
        find_trivial_answers,
    ),
    Check(
        "truncated_share",
        "share",
        0.2,
        "A truncated answer never shows its end, and a truncated thought no answer at all: a high rate "
        "means that sampling.max_tokens is too small, or that the model loops.",
        find_truncated,
    ),
    Check(
        "error_share",
        "share",
        0.01,
        "Errors are what is left after all retries: above this the server or the settings are at fault, "
        "and the prompts that are missing are not a random selection.",
        find_errors,
    ),
    Check(
        "skipped_share",
        "share",
        0.05,
        "Skipped prompts are too long or invalid for this model: above this the prompts and the context "
        "length do not fit, and long conversations are under-represented.",
        find_skipped,
    ),
    Check(
        "unreached_share",
        "share",
        0.2,
        "A turn that is truncated, fails, or calls a tool whose result is unknown ends its conversation: "
        "above this the data hardly holds later turns.",
        find_unreached,
    ),
    Check(
        "dropped_share",
        "share",
        0.05,
        "Answers were paid for but leave no training row: above this tokenize.max_length or "
        "tokenize.min_loss_tokens does not fit the data.",
        find_dropped,
    ),
    Check(
        "median_loss_tokens",
        "median",
        32,
        "DFlash learns from blocks of 16 tokens and trainers want two of them: if half of the rows "
        "have less, most of the hidden states would be paid for and not learnt from.",
        find_median_loss_tokens,
    ),
)
