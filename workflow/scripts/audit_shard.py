"""Judge one shard and write the evidence, whatever the verdict.

Bad data is never an error here: a failed job would take its evidence with it. `approve_shard` stops.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from rebuild.audit.answer_facts import COLUMNS, Asked, answer_facts, example, read_asked
from rebuild.audit.digest import DIGEST, read_digest
from rebuild.audit.facts import ANSWERED, Facts
from rebuild.audit.held_out import HeldOut, read_held_out
from rebuild.audit.sample_facts import sample_facts
from rebuild.audit.target import Target, load_target
from rebuild.audit.verdict import SCHEMA_VERSION, judge, look_at, verdict_lines
from rebuild.files import sha256_file, write_json
from rebuild.model.manifest import load_manifest
from rebuild.step import begin_step, say
from rebuild.tables import GENERATED, TOKENIZED, TableWriter, iter_rows, open_parquet, read_metadata
from rebuild.texts.drift import retokenization
from rebuild.tokens.chat import template_arguments

SAMPLE_COLUMNS = [name for name in TOKENIZED.names if name != "prompt_id"]
BATCH_ROWS = 256
DRIFT_ROWS = 64  # are rendered and tokenized again: enough to see how many differ, and quick
EXAMPLES = 3


def audit_shard(
    generated: Path,
    tokenized: Path,
    prompts: Path,
    evidence: Path,
    digest: Path,
    *,
    shard: str,
    limits: dict[str, float],
    target: Target | None = None,
    canary: Path | None = None,
    held_out: Path | None = None,
) -> None:
    """Write to `evidence` the verdict on a shard, with every check's value, limit and example samples.

    `digest` gets the numbers from which the whole run is judged later (`digest.DIGEST`). Without the `target` model,
    what needs its tokenizer is not judged; `canary` is the digest that lengths are held against, `held_out` a list of
    texts that no prompt may share.

    Raises:
        StepError: an input cannot be read, or `limits` names a check that does not exist.
    """
    listed = read_held_out(held_out) if held_out else None
    found = look_at([read_facts(generated, tokenized, prompts, target, listed)])
    verdict = judge(found, limits, read_digest(canary) if canary else None)
    if target:
        verdict["distribution"]["retokenization"] = drift(generated, target)
    facts = {
        "schema_version": SCHEMA_VERSION,
        "shard": shard,
        "tokenized_sha256": sha256_file(tokenized),
        "generated_fingerprint": read_metadata(generated).get("fingerprint", ""),
    }
    with TableWriter(digest, DIGEST, {"shard": shard}) as writer:
        writer.write_table(found.digest)
    write_json(evidence, facts | verdict | {"examples": examples(generated)})
    for line in [f"shard {shard}: {verdict['verdict']}", *verdict_lines(verdict)]:
        say(line)


def read_facts(
    generated: Path,
    tokenized: Path,
    prompts: Path,
    target: Target | None,
    held_out: HeldOut | None,
) -> Facts:
    """Reduce the shard's three files to what the checks look at, a batch of rows in memory at a time."""
    told_asked, answered, trained = map(read_metadata, (prompts, generated, tokenized))
    asked = read_asked(prompts)
    return Facts(
        prompts=asked.user_turns,
        sketches=asked.sketches,
        answers=read_answers(generated, asked, target, held_out),
        samples=read_samples(tokenized, target),
        counts=json.loads(trained.get("counts", "{}")),
        origins={
            "prompts that were answered": (
                answered.get("prompts_sha256", ""),
                told_asked.get("content_sha256", ""),
            ),
            "answers that were tokenized": (
                trained.get("generated_fingerprint", ""),
                answered.get("fingerprint", ""),
            ),
        },
        max_length=json.loads(trained.get("max_length", "null")),
        stop_ids=target.judge.stop_ids if target else None,
    )


def read_answers(
    generated: Path, asked: Asked, target: Target | None, held_out: HeldOut | None
) -> pd.DataFrame:
    """Return `Facts.answers`: the generated rows without ids, their texts judged and cut to an excerpt."""
    parts = []
    for batch in read_batches(generated, GENERATED, COLUMNS):
        facts = answer_facts(batch, asked, target)
        if held_out:
            facts["held_out"] = [held_out.shared(m) for m in batch["messages"].to_pylist()]
        parts.append(facts)
    return pd.concat(parts, ignore_index=True)


def read_samples(tokenized: Path, target: Target | None) -> pd.DataFrame:
    """Return `Facts.samples`: the tokenized rows with their ids and masks reduced to numbers."""
    size = target.vocab_size if target else None
    batches = read_batches(tokenized, TOKENIZED, SAMPLE_COLUMNS)
    return pd.concat([sample_facts(batch, size) for batch in batches], ignore_index=True)


def drift(generated: Path, target: Target) -> dict[str, Any]:
    """Return how many of a few answers, evenly spread, would have other ids if their texts were tokenized again."""
    step = max(1, open_parquet(generated).metadata.num_rows // DRIFT_ROWS)
    rows = itertools.islice(iter_rows(generated, COLUMNS), None, None, step)
    answers = [row for row in rows if row["status"] in ANSWERED and row["response_token_ids"]]
    return retokenization(answers, target.judge.tokenizer, target.template_kwargs)


def examples(generated: Path) -> list[dict[str, Any]]:
    """Return a few rows to read, the same for the same data: those whose ids have the smallest hashes."""
    rows = iter_rows(generated, [name for name in COLUMNS if not name.endswith("_ids")])
    keyed = ((hashlib.sha256(row["sample_id"].encode()).digest(), row) for row in rows)
    best: list[tuple[bytes, dict[str, Any]]] = []
    for key, row in keyed:
        best = sorted([*best, (key, row)], key=lambda pair: pair[0])[:EXAMPLES]
    return [example(row) for _, row in best]


def read_batches(path: Path, schema: Any, columns: list[str]) -> Iterator[Any]:
    """Yield the columns of a Parquet file in batches, first an empty one: a file may have no rows."""
    yield pa.RecordBatch.from_pylist([], pa.schema([schema.field(name) for name in columns]))
    yield from open_parquet(path).iter_batches(batch_size=BATCH_ROWS, columns=columns)


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    kwargs = template_arguments(
        snakemake.params.chat_template_kwargs,
        keep_reasoning=snakemake.params.history_reasoning == "preserve",
    )
    audit_shard(
        generated=Path(snakemake.input.generated),
        tokenized=Path(snakemake.input.tokenized),
        prompts=Path(snakemake.input.prompts),
        evidence=Path(snakemake.output.evidence),
        digest=Path(snakemake.output.digest),
        shard=snakemake.wildcards.shard,
        limits=snakemake.params.limits,
        target=load_target(dict(load_manifest(Path(snakemake.input.model))), kwargs),
        canary=Path(snakemake.input.canary) if snakemake.input.canary else None,
        held_out=Path(snakemake.input.held_out) if snakemake.input.held_out else None,
    )
