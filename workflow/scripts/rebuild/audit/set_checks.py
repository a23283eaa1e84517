"""The checks that look at a set as a whole, a shard, a run or a data set from elsewhere, by its digest.

Not the judge: limits are applied in `rebuild.audit.verdict`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rebuild.audit.balance import Case
from rebuild.audit.chance import allowed_count
from rebuild.audit.checks import CASES, Finding
from rebuild.audit.digest import numbers, unpack_sketches
from rebuild.audit.near_duplicates import near_copies

USUAL_STARTS = (
    5  # tokens ahead of an answer: chat templates have one or two, a few with tools and thinking
)
FEWEST_STARTS = 50  # rows; among fewer, five tokens may be all there are
FEWEST_TO_COMPARE = 8  # rows; the lengths of fewer say nothing about a distribution
# What chance exceeds 1 in 1,000 times: a distance of this times sqrt((n + m) / (n m)), a normal variable of this.
KOLMOGOROV = 1.949
NORMAL = 3.0902


@dataclass(frozen=True)
class SetCheck:
    """One check on a digest: its name in `audit.limits`, what is limited, the limit by default, and why it matters.

    "rows" and "share" are upper limits on the affected rows, "distance" one on a value, "median" a lower one.
    """

    name: str
    kind: Literal["rows", "share", "median", "distance"]
    default: float
    why: str
    find: Callable[[pa.Table, pa.Table | None], Finding | None]


def cases_of(digest: pa.Table, rows: NDArray[Any], template: str, **more: list[Any]) -> list[Case]:
    """Return the first of `rows` as cases; `template` says of each, from its columns and `more`, what was seen."""
    first = [int(row) for row in rows[:CASES]]
    shown = digest.take(pa.array(first, type=pa.int64())).to_pylist()
    for row in shown:
        row["excerpt"] = row["excerpt"] or "(not decoded)"
    extra = [{name: values[n] for name, values in more.items()} for n in range(len(first))]
    return [
        (str(row["sample_id"]), template.format_map(row | also))
        for row, also in zip(shown, extra, strict=True)
    ]


def find_mask_sum_mode(digest: pa.Table, reference: pa.Table | None) -> Finding:
    """Rows with the most frequent number of supervised tokens, among those that nothing cut short."""
    sums = numbers(digest, "mask_sum")
    whole = np.flatnonzero(numbers(digest, "whole"))
    values, counts = np.unique(sums[whole], return_counts=True)
    mode = int(values[counts.argmax()]) if len(values) else 0
    rows = whole[sums[whole] == mode]
    what = f"that nothing cut short have exactly {mode} supervised tokens"
    cases = cases_of(digest, rows, "{mask_sum} supervised tokens, answer {excerpt}")
    return Finding(len(rows), len(whole), what, cases)


def find_repeated_answers(digest: pa.Table, reference: pa.Table | None) -> Finding:
    """Rows whose answer is, id for id, the one to another prompt."""
    answers, prompts = numbers(digest, "answer_key"), numbers(digest, "prompt_key")
    rows = np.flatnonzero(numbers(digest, "whole") & (answers != 0))
    pairs = np.unique(np.stack([answers[rows], prompts[rows]], axis=1), axis=0)
    keys, prompts_each = np.unique(pairs[:, 0], return_counts=True)
    position = np.searchsorted(keys, answers[rows])
    shared = prompts_each[position] > 1 if len(rows) else np.zeros(0, dtype=bool)
    # the most frequent answers first: they are the ones to look at
    order = np.argsort(-prompts_each[position[shared]], kind="stable")
    found = rows[shared][order]
    times = [int(n) for n in prompts_each[position[shared]][order][:CASES]]
    most = times[0] if times else 0
    what = f"have an answer that another prompt has too, the most frequent one {most} prompts"
    cases = cases_of(digest, found, "{times} prompts have the answer {excerpt}", times=times)
    return Finding(len(found), len(rows), what, cases)


def find_near_duplicates(digest: pa.Table, reference: pa.Table | None) -> Finding | None:
    """Prompts that are the same as an earlier one, or nearly."""
    sketches, sketched = unpack_sketches(digest["sketch"])
    contexts = numbers(digest, "context_key")
    asked = contexts != 0
    asked[sketched] = True
    if not asked.any():
        return None
    first = np.full(len(digest), -1, dtype=np.int64)  # the earlier row that each one repeats
    nearest = near_copies(sketches)
    first[sketched[nearest >= 0]] = sketched[nearest[nearest >= 0]]
    known = np.flatnonzero(contexts)
    _, begin, group = np.unique(contexts[known], return_index=True, return_inverse=True)
    leader = known[begin][group]
    first[known[leader != known]] = leader[leader != known]
    found = np.flatnonzero(first >= 0)
    names = [digest["sample_id"][int(row)].as_py() for row in first[found[:CASES]]]
    cases = cases_of(digest, found, "asks nearly what {other} asks", other=names)
    return Finding(len(found), int(asked.sum()), "ask nearly what an earlier one asks", cases)


def find_odd_starts(digest: pa.Table, reference: pa.Table | None) -> Finding | None:
    """Rows whose answer does not begin where the others' do: behind another token than the usual ones."""
    before = numbers(digest, "before_id")
    rows = np.flatnonzero(before >= 0)
    if len(rows) < FEWEST_STARTS:
        return None
    tokens, counts = np.unique(before[rows], return_counts=True)
    usual = tokens[np.argsort(-counts, kind="stable")][:USUAL_STARTS]
    odd = rows[~np.isin(before[rows], usual)]
    what = f"begin behind another token than the {USUAL_STARTS} most frequent ones"
    return Finding(len(odd), len(rows), what, cases_of(digest, odd, "begins behind id {before_id}"))


def find_repeated_ids(digest: pa.Table, reference: pa.Table | None) -> Finding:
    """Rows with the sample id of an earlier row."""
    names = digest["sample_id"].combine_chunks().dictionary_encode()
    codes = names.indices.to_numpy()
    _, first = np.unique(codes, return_index=True)
    again = np.ones(len(codes), dtype=bool)
    again[first] = False
    rows = np.flatnonzero(again)
    what = "have the sample id of an earlier row"
    return Finding(len(rows), len(codes), what, cases_of(digest, rows, "once more"))


def find_poor_source(digest: pa.Table, reference: pa.Table | None) -> Finding | None:
    """The source that lost the largest share of its rows on the way to training, chance considered."""
    losses = {name: (of - trained, of) for name, (trained, of) in source_yields(digest).items()}
    if not any(losses):
        return None
    name = max(losses, key=lambda name: share_bound(*losses[name]))
    lost, of = losses[name]
    rows = np.flatnonzero(
        pc.equal(digest["source"].cast(pa.string()), name).fill_null(False).to_numpy()
        & ~numbers(digest, "trained")
    )
    cases = cases_of(digest, rows, "status {status}, finish_reason {finish_reason}")
    return Finding(lost, of, f"of source {name!r}, the poorest, left no training row", cases)


def share_bound(count: int, rows: int) -> float:
    """Return what the share that `count` of `rows` were drawn from is not below, but for chance.

    The lower end of Wilson's score interval (Wilson 1927), so that two of two are not worse than 90 of 100.
    """
    share, spread = count / rows, NORMAL**2 / rows
    middle = share + spread / 2
    reach = NORMAL * math.sqrt(share * (1 - share) / rows + (NORMAL / rows) ** 2 / 4)
    return max(middle - reach, 0.0) / (1 + spread)


def source_yields(digest: pa.Table) -> dict[str, tuple[int, int]]:
    """Return for each source its training rows and all its rows."""
    table = pa.table(
        {"source": digest["source"].cast(pa.string()).fill_null(""), "trained": digest["trained"]}
    )
    sums = table.group_by("source").aggregate([("trained", "sum"), ("trained", "count")])
    return {
        row["source"]: (row["trained_sum"] or 0, row["trained_count"])
        for row in sorted(sums.to_pylist(), key=lambda row: str(row["source"]))
    }


def find_length_shift(digest: pa.Table, reference: pa.Table | None) -> Finding | None:
    """How far the lengths of the answers are from those of the canary (Kolmogorov-Smirnov distance)."""
    if reference is None:
        return None
    own, other = (np.sort(answer_lengths(table)) for table in (digest, reference))
    if min(len(own), len(other)) < FEWEST_TO_COMPARE:
        return None
    points = np.union1d(own, other)
    gap = np.searchsorted(own, points, "right") / len(own)
    gap -= np.searchsorted(other, points, "right") / len(other)
    at = int(np.abs(gap).argmax())
    noise = KOLMOGOROV * math.sqrt((len(own) + len(other)) / (len(own) * len(other)))
    side = "more" if gap[at] > 0 else "fewer"
    what = (
        f"of {len(own)} answers {abs(gap[at]):.0%} {side} have at most {points[at]} tokens than in the canary "
        f"(median {np.median(own):g}, in the canary {np.median(other):g})"
    )
    distance = float(abs(gap[at]))
    return Finding(0, len(own), what, [], value=distance, bound=max(distance - noise, 0.0))


def answer_lengths(digest: pa.Table) -> NDArray[Any]:
    """Return the tokens of every answer, its thought included."""
    said = numbers(digest, "answer_tokens")
    thought = np.maximum(numbers(digest, "reasoning_tokens"), 0)
    lengths: NDArray[Any] = (said + thought)[said >= 0]
    return lengths


def find_median_loss_tokens(digest: pa.Table, reference: pa.Table | None) -> Finding:
    """The median number of supervised tokens, with the shortest rows."""
    sums = numbers(digest, "mask_sum")
    rows = np.flatnonzero(numbers(digest, "trained"))
    if not len(rows):
        return Finding(0, 0, "training rows", [])
    median = float(np.median(sums[rows]))
    shortest = rows[np.argsort(sums[rows], kind="stable")]
    cases = cases_of(digest, shortest, "{mask_sum} supervised tokens of {seq_len}")
    bound = median_bound(sums[rows])
    what = f"half of {len(rows)} rows have {median:g} supervised tokens or fewer"
    return Finding(int((sums[rows] < median).sum()), len(rows), what, cases, median, bound)


def median_bound(values: NDArray[Any]) -> float:
    """Return what the median that `values` were drawn from does not exceed, but for chance.

    The distribution-free upper bound by order statistics (sign test); infinite for fewer than 10 values.
    """
    below = allowed_count(0.5, len(values))
    return float(np.sort(values)[below]) if below < len(values) else math.inf


SET_CHECKS = (
    SetCheck(
        "repeated_id_rows",
        "rows",
        0,
        "A sample that occurs twice is learnt twice, and what is filed under its id, such as its hidden states, belongs "
        "to only one of the two.",
        find_repeated_ids,
    ),
    SetCheck(
        "odd_start_share",
        "share",
        0.05,
        "Answers begin where the chat template hands over, behind the same few tokens: a mask that is shifted by a token "
        "begins behind a different one in every row.",
        find_odd_starts,
    ),
    SetCheck(
        "mask_sum_mode_share",
        "share",
        0.1,
        "Real answers differ in length: one length in many rows means one canned answer, which is how "
        "a set of 87 % empty answers looks before its hidden states are paid for.",
        find_mask_sum_mode,
    ),
    SetCheck(
        "repeated_answer_share",
        "share",
        0.05,
        "Different questions have different answers: the same ids again and again are a canned phrase, or answers "
        "that were copied to other prompts.",
        find_repeated_answers,
    ),
    SetCheck(
        "near_duplicate_share",
        "share",
        0.1,
        "Prompts that are asked again with another word are paid for again and weigh double in training; over the run "
        "they are found across shards.",
        find_near_duplicates,
    ),
    SetCheck(
        "source_loss_share",
        "share",
        0.5,
        "A source that loses most of its rows is missing from what the drafter learns, though the run's totals "
        "look well.",
        find_poor_source,
    ),
    SetCheck(
        "length_shift",
        "distance",
        0.25,
        "Every shard is a sample of the same prompts as the canary: answers of other lengths mean that the server, its "
        "flags or the sampling are no longer what was approved.",
        find_length_shift,
    ),
    SetCheck(
        "median_loss_tokens",
        "median",
        32,
        "DFlash learns from blocks of 16 tokens and trainers want two of them: if half of the rows "
        "have less, most of the hidden states would be paid for and not learnt from.",
        find_median_loss_tokens,
    ),
)
