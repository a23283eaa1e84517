"""Judge any tokenized data set, also one that this workflow did not make; it is only read."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from rebuild.audit.approval import refusal
from rebuild.audit.dataset_facts import dataset_facts
from rebuild.audit.facts import Facts
from rebuild.audit.target import Target, load_folder
from rebuild.audit.verdict import SCHEMA_VERSION, judge, judged_share, look_at, verdict_lines
from rebuild.datasets.readers import describe_dataset, read_dataset
from rebuild.errors import StepError
from rebuild.files import write_json
from rebuild.progress import Progress
from rebuild.step import begin_step, say, show

BATCH_ROWS = 4096
BATCH_BYTES = 16 << 20
MOST_THREADS = 4  # each holds a batch and what is made of it, and Python lets few work at once


def audit_dataset(
    dataset: Path,
    evidence: Path,
    *,
    limits: dict[str, float],
    model: Path | None = None,
    threads: int = 1,
) -> list[str]:
    """Write the verdict on a data set of any format that is known to `evidence`, and return it in lines.

    `model` is the folder of its model's tokenizer; without one, what needs texts is not judged. Memory holds
    a few batches of rows, and about 200 bytes of every row.

    Raises:
        StepError: the verdict is fail (the three worst reasons, what to look at); or it cannot be read.
    """
    evidence.unlink(missing_ok=True)  # an older one, should this data set not be readable
    known = describe_dataset(dataset)
    say(
        f"{dataset}: {known.format}, {known.rows if known.rows is not None else 'unknown number of'} rows"
    )
    target = load_folder(model) if model else None
    found = look_at(read_parts(dataset, target, threads))
    if not found.digests:
        raise StepError(
            "the data set is empty",
            where=str(dataset),
            expected="rows",
            seen=f"none ({known.format})",
        )
    verdict = judge(found, limits)
    facts = {"schema_version": SCHEMA_VERSION, "shard": None, "dataset": str(dataset)}
    write_json(evidence, facts | verdict)
    if verdict["verdict"] == "fail":
        remedy = f"look at the samples, and at why and evidence in {evidence}. If the data is good and a limit is wrong "
        remedy += "for it, set that limit in audit.limits"
        raise refusal(f"the data set {dataset}", verdict, evidence, remedy)
    lines = [f"{dataset}: {judged_share(verdict)}; evidence: {evidence}", *verdict_lines(verdict)]
    if not model:
        lines.append(
            "what the answers say is judged with their model's tokenizer: dataset_model=FOLDER"
        )
    return lines


def read_parts(dataset: Path, target: Target | None, threads: int) -> Iterator[Facts]:
    """Yield the facts about the data set part by part, a few of them made at once."""
    progress = Progress(describe_dataset(dataset).rows or 0, "rows")
    batches = even_batches(read_dataset(dataset, text=False))
    threads = max(1, min(threads, MOST_THREADS))
    with ThreadPoolExecutor(threads) as pool:
        waiting = [pool.submit(dataset_facts, batch, target) for batch in islice(batches, threads)]
        while waiting:
            facts = waiting.pop(0).result()
            for batch in islice(batches, 1):
                waiting.append(pool.submit(dataset_facts, batch, target))
            progress.update(len(facts.samples))
            yield facts


def even_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the same rows in batches of BATCH_ROWS, or of BATCH_BYTES if those are fewer.

    Data sets come in batches of one row and of thousands: few rows at a time cost more than the rows themselves, and
    many at a time make arrays that leave the processor's cache.
    """
    gathered: list[Any] = []
    rows = size = 0
    for batch in batches:
        for start in range(0, len(batch), BATCH_ROWS):
            piece = batch.slice(start, BATCH_ROWS)
            rows, size = rows + len(piece), size + piece.nbytes
            if gathered and (rows > BATCH_ROWS or size > BATCH_BYTES):
                yield pa.concat_batches(gathered)
                gathered, rows, size = [], len(piece), piece.nbytes
            gathered.append(piece)
    if gathered:
        yield pa.concat_batches(gathered)


def dataset_path(given: str | None) -> Path:
    """Return the data set's path.

    Raises:
        StepError: none is given.
    """
    if given is None:
        raise StepError(
            "no data set is given",
            expected="snakemake --cores 1 audit_dataset --config dataset=PATH",
            seen="dataset: null",
        )
    return Path(given)


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    model: Any = snakemake.params.model
    lines = audit_dataset(
        dataset=dataset_path(snakemake.params.dataset),
        evidence=Path(snakemake.params.evidence),
        limits=snakemake.params.limits,
        model=Path(model) if model else None,
        threads=snakemake.threads,
    )
    show("\n".join(lines))
