"""The audit's approval: given on a good verdict or a waiver with its reason, and held against the file it was given for."""

from pathlib import Path
from typing import Any

from rebuild.audit.verdict import SCHEMA_VERSION, in_words, shard_name, worst_reasons
from rebuild.errors import StepError
from rebuild.files import read_json, sha256_file
from rebuild.shards import CANARY, WHOLE_RUN


def check_approval(tokenized: Path, approved: Path) -> str:
    """Return the SHA-256 of `tokenized`; stop unless it is the very file that the audit approved."""
    present = sha256_file(tokenized)
    judged = approved_sha256(approved)
    if present != judged:
        raise StepError(
            "these samples are not the ones that were approved",
            where=str(tokenized),
            expected=f"the file with SHA-256 {judged[:12]}, as {approved} says",
            seen=f"a file with SHA-256 {present[:12]}",
            remedy=f"have them audited: rm {approved}",
        )
    return present


def approved_sha256(approved: Path) -> str:
    """Return the SHA-256 of the file that an approval was given for.

    Raises:
        StepError: the approval is damaged, or none of a shard.
    """
    try:
        return str(read_json(approved)["tokenized_sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise StepError(
            "cannot read the approval",
            where=str(approved),
            expected="JSON as approve_shard writes it, with tokenized_sha256",
            seen=f"{type(error).__name__}: {error}",
            remedy=f"have it written again: rm {approved}",
        ) from error


def approve(verdict: dict[str, Any], evidence: Path, accept: dict[Any, str]) -> dict[str, Any]:
    """Return the approval of a shard or of the run: its name, verdict (pass or waived) and the waiver's reason.

    Raises:
        StepError: it failed and is not waived, or its waiver has no reason.
    """
    shard, reason = verdict["shard"], None
    if verdict["verdict"] != "pass":
        waivers = {shard_name(key): text for key, text in accept.items()}
        if shard not in waivers:
            raise refused(verdict, evidence)
        reason = checked_reason(shard, waivers[shard])
    return {"shard": shard, "verdict": "waived" if reason else "pass", "reason": reason}


def read_verdict(evidence: Path) -> dict[str, Any]:
    """Return the audit's evidence.

    Raises:
        StepError: it is not JSON, not an audit's, or of another version.
    """
    try:
        verdict: dict[str, Any] = read_json(evidence)
        version = verdict.get("schema_version")
        if {"shard", "verdict", "checks"} <= verdict.keys() and version == SCHEMA_VERSION:
            return verdict
    except (ValueError, AttributeError) as error:
        raise unreadable(evidence, str(error)) from error
    raise unreadable(evidence, f"schema_version {version!r}, the keys {sorted(verdict)}")


def unreadable(evidence: Path, seen: str) -> StepError:
    """Return the error for evidence that no audit has written."""
    return StepError(
        f"cannot read the audit's evidence {evidence}",
        expected=f"JSON as the audit writes it (schema_version {SCHEMA_VERSION!r})",
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


def refused(verdict: dict[str, Any], evidence: Path) -> StepError:
    """Return the error for a shard or a run that failed."""
    shard = verdict["shard"]
    if shard == WHOLE_RUN:
        return refusal(THE_RUN, verdict, evidence, run_remedy(evidence))
    whose = THE_CANARY if shard == CANARY else f"shard {shard}"
    remedy = shard_remedy(shard, evidence, worst_reasons(verdict["checks"]))
    return refusal(whose, verdict, evidence, remedy)


def refusal(whose: str, verdict: dict[str, Any], evidence: Path, remedy: str) -> StepError:
    """Return the error for what failed its audit: the worst reasons, and what to look at and to do."""
    checks = verdict["checks"]
    failed = sum(check["verdict"] == "fail" for check in checks)
    reasons = "".join(f"\n    - {in_words(check)}" for check in worst_reasons(checks))
    return StepError(
        f"{whose} failed its audit ({failed} of {len(checks)} checks); {SPARED.get(whose, SPARED[''])}",
        where=str(evidence),
        expected="every check within its limit (audit.limits)",
        seen=f"the worst of it:{reasons}",
        remedy=remedy,
    )


THE_RUN, THE_CANARY = "the whole run", "the canary"
SPARED = {
    "": "nothing expensive is done with it",
    THE_CANARY: "no other shard is generated",
    THE_RUN: "what repeats across shards, or a part of it, is beyond its limit",
}


def shard_remedy(shard: str, evidence: Path, worst: list[dict[str, Any]]) -> str:
    """Return what to look at and what to do about a shard."""
    run = evidence.parent.parent
    generated, tokenized = (
        run / phase / f"{shard}.parquet" for phase in ("generated", "tokenized")
    )
    samples = [case["sample_id"] for check in worst for case in check["evidence"][:1]]
    look = (
        f"python workflow/scripts/show_masks.py {tokenized} --sample {samples[0]}"
        if samples
        else ""
    )
    return (
        f"look at these samples in {generated}{f' ({look})' if look else ''}, and at why and evidence in {evidence}, or "
        f"make the page of it: snakemake report. If a setting is the cause (sampling.max_tokens, the template), it is "
        f"every shard's: give the run a new name. If the server or the machine was, have this shard made again: "
        f"rm {generated} {tokenized} {evidence}. Or, if the data is good and a limit is wrong for it, set that limit in "
        f"audit.limits; or, for this shard alone, waive it with the reason: "
        f'audit: {{accept: {{"{shard}": "the reason"}}}}'
    )


def run_remedy(evidence: Path) -> str:
    """Return what to look at and what to do about a run."""
    return (
        f"look at the samples named in {evidence}, or make the page of it: snakemake report. Shards are named in "
        f"{evidence.parent}/*.json. If prompts repeat across shards, take the copies out of prompts.path and give the run "
        "a new name. Or, if the data is good and a limit is wrong for it, set that limit in audit.limits; or waive it for "
        'the run with the reason: audit: {accept: {run: "the reason"}}'
    )
