"""Which evidence a report can be made of: all, or the canary's alone when it stops the other shards."""

from pathlib import Path
from typing import Any

from rebuild.files import read_json
from rebuild.shards import CANARY

WHOLE_RUN = "run"  # what the evidence on the run as a whole has for a shard


def evidence_to_report(
    wildcards: Any, *, results: Path, shards: list[str], accept: dict[str, Any]
) -> list[str]:
    """Return the evidence that the report of the run in `results` waits for, as Snakemake asks for it.

    A canary that failed its audit, and is not waived, stops every other shard: a report that waited for their evidence
    could not be made just when it is wanted.
    """
    judged = judged_parts(results, shards, accept)
    return [f"{results}/audit/{part}.json" for part in judged]


def judged_parts(results: Path, shards: list[str], accept: dict[str, Any]) -> list[str]:
    """Return what is going to have evidence: all shards and the run as a whole, or only the canary."""
    evidence = results / "audit" / f"{CANARY}.json"
    stops = CANARY in shards and CANARY not in accept and has_failed(evidence)
    if stops and not evidence.with_suffix(".approved").exists():
        return [CANARY]
    return [*shards, WHOLE_RUN]


def has_failed(evidence: Path) -> bool:
    """Say whether there is evidence with the verdict fail."""
    try:
        return bool(read_json(evidence)["verdict"] == "fail")
    except (OSError, ValueError, KeyError, TypeError):
        return False
