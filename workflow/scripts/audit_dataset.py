"""Judge any tokenized data set, also one that this workflow did not make; it is only read."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from rebuild.approval import refusal
from rebuild.dataset_facts import dataset_facts
from rebuild.dataset_readers import describe_dataset, read_dataset
from rebuild.errors import StepError
from rebuild.facts import Facts
from rebuild.files import write_json
from rebuild.progress import Progress
from rebuild.step import begin_step, say, show
from rebuild.target import Target, load_folder
from rebuild.verdict import SCHEMA_VERSION, judge, look_at, verdict_lines

BATCH_ROWS = 2048


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
    return [f"{dataset}: {verdict['verdict']} (evidence: {evidence})", *verdict_lines(verdict)]


def read_parts(dataset: Path, target: Target | None, threads: int) -> Iterator[Facts]:
    """Yield the facts about the data set part by part, a few of them made at once."""
    progress = Progress(describe_dataset(dataset).rows or 0, "rows")
    batches = small_batches(dataset)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        waiting = [pool.submit(dataset_facts, batch, target) for batch in islice(batches, threads)]
        while waiting:
            facts = waiting.pop(0).result()
            for batch in islice(batches, 1):
                waiting.append(pool.submit(dataset_facts, batch, target))
            progress.update(len(facts.samples))
            yield facts


def small_batches(dataset: Path) -> Iterator[Any]:
    """Yield the rows of the data set, few enough at a time that the arrays made of them stay in the processor's cache."""
    for batch in read_dataset(dataset, text=False):
        for start in range(0, len(batch), BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


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
