"""The samples that a job recomputes before it captures any: its own, and the canary's with what the server said of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rebuild.shards import CANARY
from rebuild.states.policy import Sampled
from rebuild.states.samples import Sample, cut, iter_samples

CANARY_CHECKED = 16  # of the canary's samples, from the shortest to the longest
COLUMNS = ["sample_id", "prompt_token_ids", "response_token_ids", "response_logprobs"]


@dataclass(frozen=True)
class Checked:
    """A sample that is recomputed: whose it is, its tokens, and what the server said of it, if it is known."""

    shard: str
    sample: Sample
    sampled: Sampled | None

    @property
    def where(self) -> str:
        """How a message names it."""
        return f"shard {self.shard}, sample {self.sample.sample_id}"


def choose_checked(
    shard: str, samples: Sequence[Sample], generated: Path, canary: Sequence[Checked]
) -> list[Checked]:
    """Return the samples that the job of `shard` recomputes: some of the canary's own, else one own and one of `canary`."""
    count = CANARY_CHECKED if shard == CANARY else 1
    return pick(shard, samples, generated, count) + list(canary)


def canary_sample(
    tokenized: Path, generated: Path, vocab_size: int, max_length: int | None
) -> list[Checked]:
    """Return the canary's sample of median length that the server gave log-probabilities of, if there is one."""
    if not (tokenized.exists() and generated.exists()):
        return []
    shorter = (cut(sample, max_length) for sample in iter_samples(tokenized, vocab_size))
    samples = [sample for sample in shorter if sample is not None]
    return [case for case in pick(CANARY, samples, generated, 1) if case.sampled is not None]


def pick(shard: str, samples: Sequence[Sample], generated: Path, count: int) -> list[Checked]:
    """Return `count` samples at even distances by length, of those with the server's log-probabilities if there are any."""
    sampled = read_sampled(generated, {sample.sample_id for sample in samples})
    known = [sample for sample in samples if sample.sample_id in sampled] or list(samples)
    ordered = sorted(known, key=len)
    count = min(count, len(ordered))
    chosen = [ordered[(2 * number + 1) * len(ordered) // (2 * count)] for number in range(count)]
    return [Checked(shard, sample, sampled.get(sample.sample_id)) for sample in chosen]


def read_sampled(generated: Path, sample_ids: set[str]) -> dict[str, Sampled]:
    """Return what the server said of those samples that it gave log-probabilities of, one for every id of the answer."""
    if not generated.exists():
        return {}
    given = pc.field("response_logprobs").is_valid()
    rows = pq.read_table(generated, columns=COLUMNS, filters=given).to_pylist()
    return {
        row["sample_id"]: Sampled(
            len(row["prompt_token_ids"]), np.array(row["response_logprobs"], dtype=np.float32)
        )
        for row in rows
        if row["sample_id"] in sample_ids
        and len(row["response_logprobs"]) == len(row["response_token_ids"] or []) > 0
    }
