"""The samples of a tokenized shard as extraction takes them: checked, cut to length, in the table's order."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rebuild.errors import StepError
from rebuild.tables import iter_rows

COLUMNS = ["sample_id", "source", "input_ids", "loss_mask", "seq_len"]


@dataclass(frozen=True)
class Sample:
    """One sample's tokens: `input_ids` int32 [S] and `loss_mask` int8 [S], 1 where supervised."""

    sample_id: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.int8]
    source: str = ""

    def __len__(self) -> int:
        return len(self.input_ids)

    def made_from(self, identity: str) -> str:
        """Return a hash of the tokens, the mask, and `identity`, which stands for everything else."""
        digest = hashlib.sha256(f"{identity}\n{len(self)}\n".encode())
        digest.update(self.input_ids.tobytes())
        digest.update(self.loss_mask.tobytes())
        return digest.hexdigest()


def iter_samples(tokenized: Path, vocab_size: int) -> Iterator[Sample]:
    """Yield the shard's samples in order, each checked.

    Raises:
        StepError: names the first sample that no drafter could be trained on.
    """
    seen: set[str] = set()
    for row in iter_rows(tokenized, COLUMNS):
        fault = describe_fault(row, vocab_size)
        if not fault and row["sample_id"] in seen:
            fault = "its id occurs twice"
        if fault:
            raise StepError(
                f"a tokenized sample cannot be extracted: {fault}",
                where=f"{tokenized}, sample {row['sample_id']!r}",
                expected="as many ids as mask values and as seq_len says, ids of the model's vocabulary, "
                "two neighbouring supervised tokens (SpecForge's loader refuses less), an id of its own",
                seen=fault,
                remedy="the audit should have stopped this shard: remove its tokenized, audit and generated "
                "files and run again; if it comes back, the model or tokenizer does not match the data",
            )
        seen.add(row["sample_id"])
        yield Sample(
            row["sample_id"],
            np.array(row["input_ids"], dtype=np.int32),
            np.array(row["loss_mask"], dtype=np.int8),
            row["source"] or "",
        )


def describe_fault(row: dict[str, Any], vocab_size: int) -> str:
    """Return what makes a tokenized row unusable, with its numbers, or an empty string."""
    ids, mask = row["input_ids"] or [], row["loss_mask"] or []
    if not row["sample_id"]:
        return "it has no id"
    if not ids or not len(ids) == len(mask) == row["seq_len"]:
        return f"{len(ids)} ids, {len(mask)} mask values, seq_len {row['seq_len']}"
    if set(mask) - {0, 1}:
        return f"mask values {sorted(set(mask))}"
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"ids from {min(ids)} to {max(ids)}, vocabulary of {vocab_size}"
    if not is_trainable(np.array(mask)):
        return f"{sum(mask)} supervised tokens, no two of them neighbours"
    return ""


def is_trainable(loss_mask: npt.NDArray[Any]) -> bool:
    """Return whether two neighbouring tokens are supervised, the least that SpecForge's loader accepts."""
    return bool(np.any(loss_mask[:-1] & loss_mask[1:]))


def cut(sample: Sample, max_length: int | None) -> Sample | None:
    """Return the sample's first `max_length` tokens, or None if nothing trainable is left of it."""
    if max_length is None or len(sample) <= max_length:
        return sample
    shorter = replace(
        sample,
        input_ids=sample.input_ids[:max_length],
        loss_mask=sample.loss_mask[:max_length],
    )
    return shorter if is_trainable(shorter.loss_mask) else None
