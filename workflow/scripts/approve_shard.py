"""Let an audited shard pass to the expensive phases, or stop with the worst reasons and the ways out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rebuild.audit.approval import approve, read_verdict
from rebuild.errors import StepError
from rebuild.files import write_json
from rebuild.step import begin_step, say
from rebuild.tables import read_metadata


def approve_shard(
    evidence: Path,
    approved: Path,
    *,
    accept: dict[Any, str],
    index: Path,
    withdrawn: Sequence[Path] = (),
) -> None:
    """Write `approved` if the verdict in `evidence` is pass, or is waived with a reason in `accept`.

    `accept` maps shards (as five digits or a number) to reasons. The file has no date in it, so that
    a second audit of the same data changes nothing downstream. What an earlier approval had made possible
    and is made again in seconds (`withdrawn`) goes with it.

    Raises:
        StepError: the shard failed and is not waived, its waiver has no reason, the evidence
            cannot be read, or hidden states (`index`) are there already that are of other samples.
    """
    verdict = read_verdict(evidence)
    try:
        approval = approve(verdict, evidence, accept)
    except StepError:
        for path in withdrawn:
            path.unlink(missing_ok=True)
        raise
    check_states(index, approval["shard"], verdict["tokenized_sha256"])
    write_json(approved, approval | {"tokenized_sha256": verdict["tokenized_sha256"]})
    reason = approval["reason"]
    say(f"shard {approval['shard']}: {approval['verdict']}{f' ({reason})' if reason else ''}")


def check_states(index: Path, shard: str, tokenized_sha256: str) -> None:
    """Stop if the shard's hidden states are of other samples than the ones that were judged.

    Raises:
        StepError: names what must go before the new samples can have theirs.
    """
    if not index.exists():
        return
    extracted = read_metadata(index).get("tokenized_sha256")
    if extracted != tokenized_sha256:
        raise StepError(
            f"the hidden states of shard {shard} are of other samples than the ones that were judged now",
            where=str(index),
            expected=f"states of the samples with SHA-256 {tokenized_sha256[:12]}",
            seen=f"states of samples with SHA-256 {(extracted or 'unknown')[:12]}",
            remedy=f"to give them up for the new samples' own: rm -r {index} {index.with_suffix('')}",
        )


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    approve_shard(
        evidence=Path(snakemake.input.evidence),
        approved=Path(snakemake.output.approved),
        accept=snakemake.params.accept,
        index=Path(snakemake.params.index),
        withdrawn=[Path(path) for path in snakemake.params.withdrawn],
    )
