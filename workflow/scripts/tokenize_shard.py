"""Turn the recorded answers of one shard into training rows: token ids and loss mask.

Not a tokenizer: the ids are those that the engine was given and sampled, and nothing is rendered again. Only answers that
came without ids are, where the configuration allows it.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rebuild.errors import StepError
from rebuild.files import forget_partial
from rebuild.step import begin_step, say
from rebuild.tables import TOKENIZED, TableWriter, open_parquet, read_metadata
from rebuild.texts.rows import ANSWERED, TEXTS, UNSTABLE, TextRows, with_origin
from rebuild.tokens.masks import join_ids, list_lengths

COPIED = ["sample_id", "prompt_id", "turn", "source", "finish_reason"]
COLUMNS = [*COPIED, "prompt_token_ids", "response_token_ids", "status", "completion_tokens"]
UNANSWERED = {"error": "status_error", "skipped": "status_skipped", UNSTABLE: UNSTABLE}
REASONS = (*UNANSWERED.values(), "truncated", "too_few_loss_tokens", "too_long")


def tokenize_shard(
    generated: Path,
    tokenized: Path,
    *,
    max_length: int | None,
    min_loss_tokens: int,
    truncated: str,
    fingerprint: str,
    texts: TextRows | None = None,
    batch_rows: int = 256,
) -> None:
    """Write a row of `tables.TOKENIZED` for every answer in `generated` that can be trained on.

    Rows longer than `max_length` tokens are cut on the right. Rows left with fewer than
    `min_loss_tokens` supervised tokens are dropped, and so are truncated answers if `truncated` is
    "drop"; the file's metadata says under `counts` how many went, by reason. Answers without token
    ids get them from `texts`, and its account of them is in the metadata under `template`; None
    allows no such answer. `batch_rows` rows are in memory at a time.

    Raises:
        StepError: an answer without token ids, an unknown status, or rows that do not add up.
    """
    source = read_metadata(generated)
    facts = {
        "fingerprint": fingerprint,
        "generated_fingerprint": source.get("fingerprint", ""),
        "model_sha256": source.get("model_sha256", ""),
        "max_length": json.dumps(max_length),
        "min_loss_tokens": str(min_loss_tokens),
    }
    file = open_parquet(generated)
    seen: Counter[str] = Counter()
    with TableWriter(tokenized, TOKENIZED, facts) as writer:
        columns = COLUMNS + (TEXTS if texts else [])
        for batch in file.iter_batches(batch_size=batch_rows, columns=columns):
            batch = texts.fill(batch) if texts else with_origin(batch)
            check_ids(batch, generated)
            fates = row_fates(batch, max_length, min_loss_tokens, truncated)
            seen.update(fates.tolist())
            rows = training_rows(batch.filter(pa.array(fates == "kept")), max_length)
            # Columns go in as they are: as Python rows they would cost many times the work.
            writer.write_table(rows)
        counts = balanced_counts(file.metadata.num_rows, seen, generated)
        writer.metadata["counts"] = json.dumps(counts)
        if texts:
            writer.metadata["template"] = json.dumps(texts.facts(), ensure_ascii=False)
            texts.report()
    say(f"{tokenized}: {counts}")


def check_ids(batch: Any, generated: Path) -> None:
    """Refuse a status that this version does not know, and an answer without the engine's token ids.

    An empty list is missing ids too, except for the response of an answer that counts no tokens.

    Raises:
        StepError: names the first such sample.
    """
    status = batch["status"].to_numpy(zero_copy_only=False)
    answered = np.isin(status, ANSWERED)
    unknown = ~answered & ~np.isin(status, list(UNANSWERED))
    silent = batch["completion_tokens"].fill_null(0).to_numpy(zero_copy_only=False) == 0
    response_null = batch["response_token_ids"].is_null().to_numpy(zero_copy_only=False)
    response_empty = list_lengths(batch["response_token_ids"]) == 0
    prompt_empty = list_lengths(batch["prompt_token_ids"]) == 0
    missing = answered & (prompt_empty | response_null | (response_empty & ~silent))
    for row in np.flatnonzero(unknown | missing)[:1]:
        sample, seen = batch["sample_id"][row].as_py(), status[row]
        raise StepError(
            f"sample {sample} has {'an unknown status' if unknown[row] else 'no token ids'}",
            where=str(generated),
            expected=f"prompt_token_ids and response_token_ids where status is one of {', '.join(ANSWERED)}; "
            "otherwise status error or skipped",
            seen=f"status {seen!r}, {list_lengths(batch['prompt_token_ids'])[row]} prompt ids, "
            f"{list_lengths(batch['response_token_ids'])[row]} response ids",
            remedy="the server must return ids (return_token_ids): look at its log, remove this file "
            f"and generate the shard again: rm {generated}; or, where it cannot, set tokenize.allow_template: true",
        )


def row_fates(
    batch: Any, max_length: int | None, min_loss_tokens: int, truncated: str
) -> NDArray[np.str_]:
    """Return for every row "kept" or why it is dropped, one of `REASONS`."""
    status = batch["status"].to_numpy(zero_copy_only=False)
    prompt = list_lengths(batch["prompt_token_ids"])
    response = list_lengths(batch["response_token_ids"])
    room = response if max_length is None else np.minimum(response, max_length - prompt)
    conditions = [
        *(status == name for name in UNANSWERED),
        (status == "truncated") & (truncated == "drop"),
        response < min_loss_tokens,
        room < min_loss_tokens,
    ]
    return np.select(conditions, list(REASONS), default="kept")


def training_rows(batch: Any, max_length: int | None) -> Any:
    """Return the rows of `batch` as a table with the columns of `tables.TOKENIZED`."""
    prompts, responses = batch["prompt_token_ids"], batch["response_token_ids"]
    input_ids, loss_mask = join_ids(prompts, responses, max_length)
    lengths = list_lengths(input_ids)
    supervised = lengths - np.minimum(list_lengths(prompts), lengths)
    columns = {name: batch[name] for name in [*COPIED, "mask_origin"]} | {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "seq_len": pa.array(lengths, type=pa.int32()),
        "loss_tokens": pa.array(supervised, type=pa.int32()),
    }
    return pa.table([columns[name] for name in TOKENIZED.names], schema=TOKENIZED)


def balanced_counts(rows: int, seen: Counter[str], generated: Path) -> dict[str, Any]:
    """Return the counts for the metadata: rows in, rows out, and rows dropped by reason.

    Raises:
        StepError: `rows` is not out + dropped.
    """
    dropped = {reason: seen[reason] for reason in REASONS}
    counts = {"in": rows, "out": seen["kept"], "dropped": dropped}
    if rows != seen["kept"] + sum(dropped.values()):
        raise StepError(
            "rows were lost while tokenizing",
            where=str(generated),
            expected=f"{rows} rows, as the file says",
            seen=json.dumps(counts),
            remedy=f"the file is damaged: rm {generated} and generate the shard again",
        )
    return counts


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    os.environ["RAYON_NUM_THREADS"] = str(snakemake.threads)  # tokenizers would take all cores
    tokenize_shard(
        generated=Path(snakemake.input.generated),
        tokenized=Path(snakemake.output.tokenized),
        max_length=snakemake.params.max_length,
        min_loss_tokens=snakemake.params.min_loss_tokens,
        truncated=snakemake.params.truncated,
        fingerprint=snakemake.params.fingerprint,
        texts=TextRows(
            Path(snakemake.input.model),
            snakemake.params.chat_template_kwargs,
            keep_reasoning=snakemake.params.history_reasoning == "preserve",
        )
        if snakemake.params.allow_template
        else None,
    )
    forget_partial(Path(snakemake.params.answered))
