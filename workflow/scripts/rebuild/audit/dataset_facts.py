"""The facts about training rows from elsewhere: only ids and masks are sure to be there, texts are decoded."""

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rebuild.audit.answer_facts import EXCERPT
from rebuild.audit.facts import Facts, answer_kind
from rebuild.audit.near_duplicates import sketch_rows
from rebuild.audit.sample_facts import aligned_mask, chosen, one_array, sample_facts
from rebuild.audit.target import Target
from rebuild.tokens.masks import flat_values, list_lengths, row_starts

GRAM_IDS = 5  # about four words


def dataset_facts(batch: Any, target: Target | None) -> Facts:
    """Return the facts about a record batch of `datasets.columns.DATASET`."""
    known = [name for name in batch.schema.names if batch[name].null_count < len(batch)]
    samples = sample_facts(batch.select(known), target.vocab_size if target else None)
    ids, lengths = flat_values(one_array(batch["input_ids"])), list_lengths(batch["input_ids"])
    starts = row_starts(lengths)
    supervised = aligned_mask(one_array(batch["loss_mask"]), lengths)
    context, context_starts = chosen(ids, ~supervised, starts)
    answers = pd.DataFrame(index=samples.index)
    answers["sample_id"] = samples["sample_id"]
    if "finish_reason" in samples:
        answers["finish_reason"] = samples["finish_reason"]
    elif target:
        answers["finish_reason"] = told_by_its_end(samples, target)
    cut = answers.get("finish_reason", pd.Series("", index=answers.index)) == "length"
    answers["status"] = np.where(cut.fillna(False).astype(bool), "truncated", "ok")
    if target:
        rows = (slice(*pair) for pair in pairwise(starts))
        texts = [judge_row(ids[row], supervised[row], target) for row in rows]
        answers[TEXTS] = pd.DataFrame(texts, columns=TEXTS, index=answers.index)
    return Facts(
        samples=samples,
        answers=answers,
        sketches=sketch_rows(context, context_starts, GRAM_IDS, boilerplate=True),
        stop_ids=target.judge.stop_ids if target else None,
    )


def told_by_its_end(samples: pd.DataFrame, target: Target) -> NDArray[Any]:
    """Return why each answer ended, as far as its last ids tell: by its stop token, or cut."""
    stops = target.judge.stop_ids
    stopped = samples["end_id"].isin(stops) | samples["after_id"].isin(stops)
    return np.where(stopped, "stop", "length")


TEXTS = ["kind", "excerpt", "stray_marker"]
WORST = ("empty", "trivial", "said")


def judge_row(
    ids: NDArray[Any], supervised: NDArray[np.bool_], target: Target
) -> tuple[str, str, str]:
    """Return the values of TEXTS for a row, of its worst run of supervised ids; a row may hold several answers."""
    edges = np.flatnonzero(np.diff(supervised.astype(np.int8), prepend=0, append=0))
    runs = [judge_run(ids[begin:end], target) for begin, end in edges.reshape(-1, 2)]
    if not runs:
        return "", "", ""
    kind, excerpt, _ = min(runs, key=lambda run: WORST.index(run[0]))
    return kind, excerpt, next((marker for *_, marker in runs if marker), "")


def judge_run(ids: NDArray[Any], target: Target) -> tuple[str, str, str]:
    """Return what one run of supervised ids amounts to (`facts.answer_kind`), its beginning, and a stray marker."""
    known = ids[(ids >= 0) & (ids < target.vocab_size)]
    ended = len(known) > 0 and int(known[-1]) in target.judge.stop_ids
    said = known[:-1] if ended else known
    # as an array: the numbers of a list would be looked at one by one
    text = target.judge.tokenizer.decode(said)
    kind = answer_kind("ok", None, text, None, len(ids))
    row = {"response_token_ids": said.tolist(), "finish_reason": "length", "content": None}
    return kind, repr(text[:EXCERPT]), target.stray_marker(row)
