"""Let an audited run pass, or stop with the worst reasons and the ways out."""

from pathlib import Path
from typing import Any

from rebuild.audit.approval import approve, read_verdict
from rebuild.files import write_json
from rebuild.step import begin_step, say


def approve_run(evidence: Path, approved: Path, *, accept: dict[Any, str]) -> None:
    """Write `approved` if the verdict on the whole run is pass, or is waived with a reason in `accept` under "run".

    Raises:
        StepError: the run failed and is not waived, its waiver has no reason, or the evidence cannot be read.
    """
    approval = approve(read_verdict(evidence), evidence, accept)
    write_json(approved, approval)
    reason = approval["reason"]
    say(f"the whole run: {approval['verdict']}{f' ({reason})' if reason else ''}")


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    approve_run(
        evidence=Path(snakemake.input.evidence),
        approved=Path(snakemake.output.approved),
        accept=snakemake.params.accept,
    )
