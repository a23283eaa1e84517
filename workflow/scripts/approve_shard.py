"""Let an audited shard pass to the expensive phases, or stop with the worst reasons and the ways out."""

from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from rebuild.step import begin_step, say
from rebuild.tables import read_metadata
from rebuild.verdict import in_words, shard_name, worst_reasons


def approve_shard(evidence: Path, approved: Path, *, accept: dict[Any, str], index: Path) -> None:
    """Write `approved` if the verdict in `evidence` is pass, or is waived with a reason in `accept`.

    `accept` maps shards (as five digits or a number) to reasons. The file has no date in it, so that
    a second audit of the same data changes nothing downstream.

    Raises:
        StepError: the shard failed and is not waived, its waiver has no reason, the evidence
            cannot be read, or hidden states (`index`) are there already that are of other samples.
    """
    verdict = read_verdict(evidence)
    shard, reason = verdict["shard"], None
    if verdict["verdict"] != "pass":
        waivers = {shard_name(key): text for key, text in accept.items()}
        if shard not in waivers:
            raise refusal(verdict, evidence)
        reason = checked_reason(shard, waivers[shard])
    check_states(index, shard, verdict["tokenized_sha256"])
    approval = {
        "shard": shard,
        "verdict": "pass" if reason is None else "waived",
        "reason": reason,
        "tokenized_sha256": verdict["tokenized_sha256"],
    }
    write_json(approved, approval)
    say(f"shard {shard}: {approval['verdict']}{f' ({reason})' if reason else ''}")


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


def read_verdict(evidence: Path) -> dict[str, Any]:
    """Return the audit's evidence.

    Raises:
        StepError: it is not JSON, or not an audit's.
    """
    try:
        verdict: dict[str, Any] = read_json(evidence)
        if {"shard", "verdict", "checks", "tokenized_sha256"} <= verdict.keys():
            return verdict
    except (ValueError, AttributeError) as error:
        raise unreadable(evidence, str(error)) from error
    raise unreadable(evidence, f"only the keys {sorted(verdict)}")


def unreadable(evidence: Path, seen: str) -> StepError:
    """Return the error for evidence that no audit has written."""
    return StepError(
        f"cannot read the audit's evidence {evidence}",
        expected="JSON as audit_shard writes it",
        seen=seen,
        remedy=f"have it written again: rm {evidence}",
    )


def checked_reason(shard: str, reason: Any) -> str:
    """Return the waiver's reason.

    Raises:
        StepError: there is none.
    """
    if isinstance(reason, str) and reason.strip():
        return reason.strip()
    raise StepError(
        f"the waiver for shard {shard} has no reason",
        where="audit.accept in the configuration",
        expected="one sentence that says why this data is good although its audit failed",
        seen=repr(reason),
        remedy=f'audit: {{accept: {{"{shard}": "the reason"}}}}',
    )


def refusal(verdict: dict[str, Any], evidence: Path) -> StepError:
    """Return the error for a failed shard: the worst reasons, what to look at, and the ways out."""
    shard, checks = verdict["shard"], verdict["checks"]
    failed = sum(check["verdict"] == "fail" for check in checks)
    run = evidence.parent.parent
    generated, tokenized = (
        run / phase / f"{shard}.parquet" for phase in ("generated", "tokenized")
    )
    reasons = "".join(f"\n    - {in_words(check)}" for check in worst_reasons(checks))
    return StepError(
        f"shard {shard} failed its audit ({failed} of {len(checks)} checks); nothing expensive is done with it",
        where=str(evidence),
        expected="every check within its limit (audit.limits)",
        seen=f"the worst of it:{reasons}",
        remedy=f"look at these samples in {generated}, and at why and evidence in {evidence}. If a setting is the cause "
        f"(sampling.max_tokens, the template), it is every shard's: give the run a new name. If the server or the machine "
        f"was, have this shard made again: rm {generated} {tokenized} {evidence}. Or, if the data is good and a limit "
        f"is wrong for it, set that limit in audit.limits; or, for this shard alone, waive it with the reason: "
        f'audit: {{accept: {{"{shard}": "the reason"}}}}',
    )


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    approve_shard(
        evidence=Path(snakemake.input.evidence),
        approved=Path(snakemake.output.approved),
        accept=snakemake.params.accept,
        index=Path(snakemake.params.index),
    )
