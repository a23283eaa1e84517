"""The facts about training rows from elsewhere: only ids and masks are sure to be there, texts are decoded."""

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
    if "finish_reason" in samples:
        answers["finish_reason"] = samples["finish_reason"]
    answers["sample_id"] = samples["sample_id"]
    answers["status"] = np.where(cut_short(samples), "truncated", "ok")
    if target:
        said, said_starts = chosen(ids, supervised, starts)
        rows = np.split(said, said_starts[1:-1])
        texts = [judge_text(row, target) for row in rows[: len(samples)]]
        answers[TEXTS] = pd.DataFrame(texts, columns=TEXTS, index=answers.index)
    return Facts(
        samples=samples,
        answers=answers,
        sketches=sketch_rows(context, context_starts, GRAM_IDS, boilerplate=True),
        stop_ids=target.judge.stop_ids if target else None,
    )


def cut_short(samples: pd.DataFrame) -> "pd.Series[bool]":
    """Tell which rows say of themselves that the token limit cut them."""
    if "finish_reason" not in samples:
        return pd.Series(False, index=samples.index)
    return (samples["finish_reason"] == "length").fillna(False).astype(bool)


TEXTS = ["kind", "excerpt", "stray_marker"]


def judge_text(ids: NDArray[Any], target: Target) -> tuple[str, str, str]:
    """Return what the supervised ids of a row amount to (`facts.answer_kind`), their beginning, and a stray marker."""
    known = ids[(ids >= 0) & (ids < target.vocab_size)]
    ended = len(known) > 0 and int(known[-1]) in target.judge.stop_ids
    said = known[:-1] if ended else known
    text = target.judge.tokenizer.decode(
        said
    )  # the numbers of a list would be looked at one by one
    kind = answer_kind("ok", None, text, None, len(ids))
    excerpt = repr(text[:EXCERPT])
    row = {"response_token_ids": said.tolist(), "finish_reason": "length", "content": None}
    return kind, excerpt, target.stray_marker(row)
