"""Write the approved samples of one shard as JSONL, for trainers that run the target model themselves.

Not a conversion: ids and masks go out as they are. SpecForge 0.2.0 (data/prompt_builder.py) takes rows for
pre-tokenized when the first one has `input_ids` and `loss_mask`; speculators 0.9.0 (data_generation/preprocessing.py)
does when the columns are there, and names a sample `id` and its conversation `primary_id`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rebuild.audit.approval import check_approval
from rebuild.errors import StepError
from rebuild.files import atomic_path
from rebuild.step import begin_step, say
from rebuild.tables import open_parquet
from rebuild.tokens.masks import flat_values, list_lengths, mask_facts, row_starts, row_sums

TEXTS = ["source", "finish_reason", "mask_origin"]
ABOUT = ["sample_id", "prompt_id", "turn", *TEXTS]
COLUMNS = [*ABOUT, "input_ids", "loss_mask"]
OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


def export_shard(tokenized: Path, approved: Path, exported: Path, *, batch_rows: int = 256) -> None:
    """Write a line `{id, primary_id, input_ids, loss_mask, metadata}` for every row of `tokenized`, in its order.

    `approved` is the audit's approval of exactly this `tokenized`. `batch_rows` rows are in memory at a time.

    Raises:
        StepError: the file is not the one that was approved, or a row is not fit for a trainer.
    """
    check_approval(tokenized, approved)
    rows = 0
    with atomic_path(exported) as temporary, open(temporary, "wb") as lines:
        for batch in open_parquet(tokenized).iter_batches(batch_size=batch_rows, columns=COLUMNS):
            check_rows(batch, tokenized)
            lines.writelines(json_lines(batch))
            rows += len(batch)
    say(f"{exported}: {rows} samples, {exported.stat().st_size / 1e6:.1f} MB")


def check_rows(batch: Any, tokenized: Path) -> None:
    """Refuse a row that a waiver let pass and that both trainers would stop at.

    Raises:
        StepError: names the first such sample.
    """
    lengths, mask = list_lengths(batch["input_ids"]), mask_facts(batch["loss_mask"])
    below = row_sums(flat_values(batch["input_ids"]) < 0, row_starts(lengths))
    wrong = (lengths == 0) | (lengths != mask["mask_len"]) | (mask["mask_odd"] > 0) | (below > 0)
    for row in np.flatnonzero(wrong)[:1]:
        raise StepError(
            f"sample {batch['sample_id'][row].as_py()!r} cannot be exported",
            where=str(tokenized),
            expected="at least one id, none of them null or negative, and as many mask values, each 0 or 1",
            seen=f"{lengths[row]} ids, {below[row]} of them null or negative; {mask['mask_len'][row]} mask values, "
            f"{mask['mask_odd'][row]} of them neither 0 nor 1",
            remedy="a waiver or a raised limit let it pass the audit: take that back (audit.accept, audit.limits) "
            f"and have the shard tokenized again: rm {tokenized}",
        )


def json_lines(batch: Any) -> Iterator[bytes]:
    """Yield the line of every row; ids and masks are written from their arrays, never as Python numbers.

    No value is null: `datasets`, with which speculators reads, takes a column's type from the first lines, and fails
    where they are null and later ones are not.
    """
    starts = row_starts(list_lengths(batch["input_ids"]))
    ids, mask = flat_values(batch["input_ids"]), flat_values(batch["loss_mask"])
    about = batch.select(ABOUT).to_pylist()
    for row, start, end in zip(about, starts[:-1], starts[1:], strict=True):
        line = {
            "id": row["sample_id"],
            "primary_id": row["prompt_id"] or "",
            "input_ids": ids[start:end],
            "loss_mask": mask[start:end],
            "metadata": {"turn": row["turn"] or 0} | {name: row[name] or "" for name in TEXTS},
        }
        yield orjson.dumps(line, option=OPTIONS)


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    export_shard(
        tokenized=Path(snakemake.input.tokenized),
        approved=Path(snakemake.input.approved),
        exported=Path(snakemake.output.exported),
    )
