"""Judge one shard and write the evidence, whatever the verdict.

Bad data is never an error here: a failed job would take its evidence with it. `approve_shard` stops.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rebuild.facts import Facts, answer_kind
from rebuild.files import sha256_file, write_json
from rebuild.masks import (
    Integers,
    flat_values,
    list_lengths,
    mask_facts,
    row_starts,
    row_sums,
)
from rebuild.prompts import count_user_turns
from rebuild.step import begin_step, say
from rebuild.tables import GENERATED, TOKENIZED, iter_rows, open_parquet, read_metadata
from rebuild.verdict import SCHEMA_VERSION, beyond_limit, in_words, judge, worst_reasons

USAGE = ["prompt_tokens", "completion_tokens"]
TEXTS = ["reasoning", "content", "tool_calls"]
ANSWER_COLUMNS = ["sample_id", "prompt_id", "source", "status", "finish_reason", "error", *USAGE]
SAMPLE_COLUMNS = ["sample_id", "finish_reason", "mask_origin", "seq_len", "loss_tokens"]
EXCERPT = 80  # characters
BATCH_ROWS = 256


def audit_shard(
    generated: Path,
    tokenized: Path,
    prompts: Path,
    evidence: Path,
    *,
    shard: str,
    limits: dict[str, float],
) -> None:
    """Write to `evidence` the verdict on a shard, with every check's value, limit and example samples.

    Raises:
        StepError: an input cannot be read, or `limits` names a check that does not exist.
    """
    verdict = judge(read_facts(generated, tokenized, prompts), limits)
    facts = {
        "schema_version": SCHEMA_VERSION,
        "shard": shard,
        "tokenized_sha256": sha256_file(tokenized),
        "generated_fingerprint": read_metadata(generated).get("fingerprint", ""),
    }
    write_json(evidence, facts | verdict)
    say(f"shard {shard}: {verdict['verdict']}")
    for check in worst_reasons(verdict["checks"], len(verdict["checks"])):
        say(in_words(check))
    for check in beyond_limit(verdict["checks"]):
        say(
            f"passes, since chance explains as much in so few rows, but watch it: {in_words(check)}"
        )


def read_facts(generated: Path, tokenized: Path, prompts: Path) -> Facts:
    """Reduce the shard's three files to what the checks look at, a batch of rows in memory at a time."""
    asked, answered, trained = map(read_metadata, (prompts, generated, tokenized))
    return Facts(
        prompts={row["prompt_id"]: count_user_turns(row) for row in iter_rows(prompts)},
        answers=read_answers(generated),
        samples=read_samples(tokenized),
        counts=json.loads(trained.get("counts", "{}")),
        origins={
            "prompts that were answered": (
                answered.get("prompts_sha256", ""),
                asked.get("content_sha256", ""),
            ),
            "answers that were tokenized": (
                trained.get("generated_fingerprint", ""),
                answered.get("fingerprint", ""),
            ),
        },
        max_length=json.loads(trained.get("max_length", "null")),
    )


def read_answers(generated: Path) -> pd.DataFrame:
    """Return `Facts.answers`: the generated rows without ids, their texts judged and cut to an excerpt."""
    batches = read_batches(generated, GENERATED, [*ANSWER_COLUMNS, *TEXTS, "messages"])
    return pd.concat([answer_facts(batch) for batch in batches], ignore_index=True)


def answer_facts(batch: Any) -> pd.DataFrame:
    """Return generated rows with `user_turn`, `kind` and `excerpt` in place of their texts; missing usage is -1."""
    rows: pd.DataFrame = batch.select(ANSWER_COLUMNS).to_pandas()
    rows[USAGE] = rows[USAGE].fillna(-1).astype("int64")
    texts = [batch[name].to_pylist() for name in TEXTS]
    judged = zip(rows["status"], *texts, rows["completion_tokens"], strict=True)
    spoken = zip(batch["content"].to_pylist(), batch["reasoning"].to_pylist(), strict=True)
    return rows.assign(
        user_turn=count_users(batch["messages"]),
        kind=[answer_kind(*row) for row in judged],
        excerpt=[repr((content or thought or "")[:EXCERPT]) for content, thought in spoken],
    )


def count_users(messages: Any) -> Integers:
    """Return the number of user messages in each row's messages."""
    roles = pc.struct_field(messages.flatten(), "role").to_numpy(zero_copy_only=False)
    return row_sums(roles == "user", row_starts(list_lengths(messages)))


def read_samples(tokenized: Path) -> pd.DataFrame:
    """Return `Facts.samples`: the tokenized rows with their ids and masks reduced to numbers."""
    batches = read_batches(tokenized, TOKENIZED, [*SAMPLE_COLUMNS, "input_ids", "loss_mask"])
    return pd.concat([sample_facts(batch) for batch in batches], ignore_index=True)


def read_batches(path: Path, schema: Any, columns: list[str]) -> Iterator[Any]:
    """Yield the columns of a Parquet file in batches, first an empty one: a file may have no rows."""
    yield pa.RecordBatch.from_pylist([], pa.schema([schema.field(name) for name in columns]))
    yield from open_parquet(path).iter_batches(batch_size=BATCH_ROWS, columns=columns)


def sample_facts(batch: Any) -> pd.DataFrame:
    """Return tokenized rows with `ids_len`, `ids_bad` and `masks.mask_facts` in place of ids and mask."""
    rows: pd.DataFrame = batch.select(SAMPLE_COLUMNS).to_pandas()
    rows[["seq_len", "loss_tokens"]] = rows[["seq_len", "loss_tokens"]].fillna(-1).astype("int64")
    lengths = list_lengths(batch["input_ids"])
    bad = row_sums(flat_values(batch["input_ids"]) < 0, row_starts(lengths))
    return rows.assign(ids_len=lengths, ids_bad=bad, **mask_facts(batch["loss_mask"]))


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    audit_shard(
        generated=Path(snakemake.input.generated),
        tokenized=Path(snakemake.input.tokenized),
        prompts=Path(snakemake.input.prompts),
        evidence=Path(snakemake.output.evidence),
        shard=snakemake.wildcards.shard,
        limits=snakemake.params.limits,
    )
