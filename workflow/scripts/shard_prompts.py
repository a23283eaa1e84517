"""Read prompts from files of any accepted shape and deal them out to shards, every row accounted for."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rebuild.errors import StepError
from rebuild.files import write_json
from rebuild.progress import Progress
from rebuild.prompts.canary import HOW, Portion, Strata, choose_canary
from rebuild.prompts.refusal import REASONS, Refusal
from rebuild.prompts.rows import SourceRow, read_rows
from rebuild.prompts.rows_to_prompts import (
    MAX_CHARS,
    Prompt,
    canonical,
    conversation_digest,
    count_user_turns,
    given_id,
    to_prompt,
)
from rebuild.prompts.sources import check_unchanged, source_identity
from rebuild.prompts.spill import Spill, assign_rows, check_enough, rows_without
from rebuild.shards import CANARY
from rebuild.step import begin_step, say
from rebuild.tables import PROMPTS, REJECTED, ROW_GROUP, SCHEMA_VERSION, TableWriter

DIGEST_BYTES = 16  # of SHA-256: two of a million prompts collide with probability 1e-27
GROUP_BYTES = 32 << 20  # of prompts in memory while a shard is written
EXAMPLES = 3  # of each reason, in the error


@dataclass
class Intake:
    """What has been read so far: counts, examples of each reason, digests of ids and conversations, and their strata."""

    rows: int = 0
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    ids: set[bytes] = field(default_factory=set)
    conversations: set[bytes] = field(default_factory=set)
    strata: Strata = field(default_factory=Strata)


def shard_prompts(
    source: Path,
    out_dir: Path,
    shards: list[str],
    *,
    canary: int,
    assign: str,
    max_rejected: float,
    limit: int | None,
    fingerprint: str,
    max_chars: int = MAX_CHARS,
) -> None:
    """Write the prompts of `source` to `out_dir/<shard>.parquet`, with `rejected.parquet` and `manifest.json`.

    Every row is accepted or rejected with a reason (`rebuild.prompts.rows_to_prompts.REASONS`); `limit` ends the
    reading after that many accepted ones. `canary` of the accepted ones (0 is none) make up the shard
    of that name, and what they leave is dealt out to `shards`. The manifest is written last.

    Raises:
        StepError: more than `max_rejected` of the rows were refused (a fraction), or fewer were
            accepted than the canary and one for each shard.
    """
    identity = source_identity(source)
    facts = {"fingerprint": fingerprint}
    with Spill(out_dir) as spill:
        with TableWriter(out_dir / "rejected.parquet", REJECTED, dict(facts)) as rejected:
            intake = _take_in(source, spill, rejected, limit, max_chars)
        check_unchanged(source, identity)
        _check_rejected(intake, source, max_rejected)
        check_enough(len(spill), len(shards), canary)
        portions = choose_canary(intake.strata, canary)
        parts = _deal(len(spill), shards, assign, portions)
        (out_dir / "manifest.json").unlink(missing_ok=True)
        written = _write_shards(spill, out_dir, parts, facts)
    _check_balance(intake, sum(shard["prompts"] for shard in written.values()), rejected.rows)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint,
        "sources": identity,
        "rows": intake.rows,
        "accepted": intake.accepted,
        "rejected": intake.reasons.total(),
        "rejected_reasons": dict(sorted(intake.reasons.items())),
        "assign": assign,
        "canary": _in_manifest(portions),
        "shards": written,
    }
    write_json(out_dir / "manifest.json", manifest)


def _take_in(
    source: Path, spill: Spill, rejected: TableWriter, limit: int | None, max_chars: int
) -> Intake:
    """Read every row once: prompts go to `spill`, the others to `rejected`."""
    intake = Intake()
    for row in read_rows(source):
        prompt_id = None
        intake.rows += 1
        try:
            columns = row.columns()
            prompt_id = given_id(columns)
            prompt = to_prompt(columns, row.file, max_chars)
            _check_new(prompt, intake)
        except Refusal as refusal:
            rejected.write([_reject(row, prompt_id, refusal, intake)])
        else:
            spill.append(canonical(prompt))
            intake.strata.add(prompt)
            intake.accepted += 1
        if intake.rows % 100_000 == 0:
            say(f"{intake.rows} rows read, {intake.accepted} accepted")
        if intake.accepted == limit:
            break
    spill.flush()
    say(f"{intake.rows} rows read, {intake.accepted} accepted: {_counts(intake) or 'all'}")
    return intake


def _check_new(prompt: Prompt, intake: Intake) -> None:
    """Remember the prompt, or refuse it if its conversation or its id has been seen."""
    conversation = conversation_digest(prompt)[:DIGEST_BYTES]
    prompt_id = hashlib.sha256(prompt["prompt_id"].encode()).digest()[:DIGEST_BYTES]
    if conversation in intake.conversations:
        raise Refusal("duplicate_conversation", "seen before")
    if prompt_id in intake.ids:
        raise Refusal("duplicate_id", f"id {prompt['prompt_id']}")
    intake.conversations.add(conversation)
    intake.ids.add(prompt_id)


def _reject(
    row: SourceRow, prompt_id: str | None, refusal: Refusal, intake: Intake
) -> dict[str, Any]:
    """Count the refused row and return its row of `rejected.parquet`."""
    intake.reasons[refusal.reason] += 1
    examples = intake.examples.setdefault(refusal.reason, [])
    if len(examples) < EXAMPLES:
        examples.append(f"{row.file}:{row.line} {refusal.reason} ({refusal.detail})")
    return {
        "file": row.file,
        "line": row.line,
        "prompt_id": prompt_id,
        "reason": refusal.reason,
        "detail": f"{refusal.detail} | {row.excerpt()}",
    }


def _counts(intake: Intake) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in intake.reasons.most_common())


def _check_rejected(intake: Intake, source: Path, max_rejected: float) -> None:
    """Stop where nothing, or too little, of the source can be used."""
    count = intake.reasons.total()
    if intake.accepted and count / intake.rows <= max_rejected:
        return
    if not intake.rows:
        raise StepError(
            f"{source} holds no rows",
            expected="at least one prompt",
            remedy="point prompts.path at the right file or folder",
        )
    raise StepError(
        f"{count} of {intake.rows} rows of {source} cannot be used as prompts",
        where="\n    ".join(example for some in intake.examples.values() for example in some),
        expected=f"at most {max_rejected:.1%} of the rows refused, and at least one accepted",
        seen="\n    ".join(
            f"{count} {reason}: {REASONS[reason]}" for reason, count in intake.reasons.most_common()
        )
        or "no rows",
        remedy="mend or remove these rows, or raise `prompts.max_rejected` if they may be left out",
    )


def _deal(
    count: int, shards: list[str], assign: str, portions: dict[str, Portion]
) -> dict[str, Sequence[int]]:
    """Return the row numbers of every shard: the canary's in order, and those that it leaves."""
    taken = sorted(number for portion in portions.values() for number in portion.chosen)
    parts = assign_rows(rows_without(count, taken), len(shards), assign)
    numbered = dict(zip(shards, parts, strict=True))
    return {CANARY: taken, **numbered} if taken else numbered


def _in_manifest(portions: dict[str, Portion]) -> dict[str, Any] | None:
    """Return what the manifest says of the canary: how many prompts, how they were chosen, and how many of each source."""
    if not portions:
        return None
    sources = {
        name: {"prompts": len(portion.chosen), "of": portion.of}
        for name, portion in portions.items()
    }
    count = sum(source["prompts"] for source in sources.values())
    return {"prompts": count, "chosen": HOW, "sources": sources}


def _write_shards(
    spill: Spill, out_dir: Path, parts: dict[str, Sequence[int]], facts: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Write one file for each shard and return what the manifest says of it."""
    progress = Progress(len(spill), "prompts written")
    written = {}
    for shard, numbers in parts.items():
        written[shard] = _write_shard(spill, out_dir / f"{shard}.parquet", numbers, facts)
        progress.update(len(numbers))
    progress.finish()
    return written


def _write_shard(
    spill: Spill, path: Path, numbers: Sequence[int], facts: dict[str, str]
) -> dict[str, Any]:
    """Write the records `numbers` as one file; the spilled bytes are what `content_hash` hashes."""
    digest = hashlib.sha256()
    turns = 0
    mean_bytes = sum(map(spill.size, numbers)) // len(numbers) + 1
    row_group = max(1, min(ROW_GROUP, GROUP_BYTES // mean_bytes))
    with TableWriter(path, PROMPTS, dict(facts), row_group) as writer:
        for number in numbers:
            record = spill.read(number)
            digest.update(record + b"\n")
            prompt = orjson.loads(record)
            turns += count_user_turns(prompt)
            writer.write([prompt])
        writer.metadata["content_sha256"] = digest.hexdigest()
    return {
        "prompts": len(numbers),
        "user_turns": turns,
        "content_sha256": digest.hexdigest(),
    }


def _check_balance(intake: Intake, written: int, rejected: int) -> None:
    """Check that no row was lost or counted twice on its way to the files."""
    if written + rejected != intake.rows:
        raise StepError(
            "the rows of the prompts do not balance",
            expected=f"{intake.rows} rows read = prompts written + rows rejected",
            seen=f"{written} + {rejected}",
            remedy="this is a fault of shard_prompts.py: please report it with the source",
        )


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    shard_prompts(
        source=Path(snakemake.input.source),
        out_dir=Path(snakemake.output.manifest).parent,
        shards=list(snakemake.params.shards),
        canary=snakemake.params.canary,
        assign=snakemake.params.assign,
        max_rejected=snakemake.params.max_rejected,
        limit=snakemake.params.limit,
        fingerprint=snakemake.params.fingerprint,
    )
