"""Judge all shards of a run together, from what their audits left; no answer is read again."""

from pathlib import Path
from typing import Any

from rebuild.audit.approval import read_verdict
from rebuild.audit.checks import Finding
from rebuild.audit.digest import read_digest
from rebuild.audit.verdict import SCHEMA_VERSION, Found, judge, shard_name, verdict_lines
from rebuild.files import write_json
from rebuild.step import begin_step, say

EXAMPLES = 12


def audit_run(
    evidence: list[Path],
    digests: list[Path],
    verdict: Path,
    *,
    limits: dict[str, float],
    accept: dict[Any, str],
) -> None:
    """Write to `verdict` the judgement on the whole run.

    What the checks of rows found in the shards (`evidence`) adds up; the others are judged anew on all rows (`digests`).
    What was found in a shard that is waived (`accept`) was accepted there, and does not count again: a check that failed
    there leaves out that shard.

    Raises:
        StepError: `limits` names a check that does not exist, or what an audit left cannot be read.
    """
    waived = {shard_name(key) for key in accept}
    found = Found()
    drifted: list[dict[str, Any]] = []
    examples: list[dict[str, Any]] = []
    for part, path in enumerate(evidence):
        shard = read_verdict(path)
        add_shard(found, shard, part, waived=shard["shard"] in waived)
        drifted.append(shard["distribution"].get("retokenization", {}))
        examples += shard.get("examples", [])[: max(1, EXAMPLES // len(evidence))]
    found.digests = [read_digest(path) for path in digests]
    judgement = judge(found, limits)
    judgement["distribution"]["retokenization"] = add_drift(drifted)
    facts = {"schema_version": SCHEMA_VERSION, "shard": "run", "shards": len(evidence)}
    write_json(verdict, facts | judgement | {"examples": examples[:EXAMPLES]})
    for line in [f"the whole run: {judgement['verdict']}", *verdict_lines(judgement)]:
        say(line)


def add_shard(found: Found, shard: dict[str, Any], part: int, *, waived: bool) -> None:
    """Add what the checks of rows found in a shard, the `part`-th of the run, and its counts."""
    for check in shard["checks"]:
        if check["verdict"] == "not judged":
            continue
        cases = [(case["sample_id"], case["seen"]) for case in check["evidence"]]
        finding = Finding(check["count"], check["of"], check["what"], cases)
        if waived and check["verdict"] == "fail":
            finding = Finding(0, 0, check["what"], [])
            found.excused.setdefault(check["name"], set()).add(part)
        found.findings.setdefault(check["name"], []).append(finding)
    found.prompts += shard["rows"]["prompts"]
    for reason, count in shard["rows"]["dropped"].items():
        dropped = found.counts.setdefault("dropped", {})
        dropped[reason] = dropped.get(reason, 0) + count


def add_drift(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the retokenization of all shards together."""
    known = [part for part in parts if part]
    return {
        "rows": sum(part["rows"] for part in known),
        "differing": sum(part["differing"] for part in known),
        "examples": [example for part in known for example in part["examples"]][:EXAMPLES],
    }


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    audit_run(
        evidence=[Path(path) for path in snakemake.input.evidence],
        digests=[Path(path) for path in snakemake.input.digests],
        verdict=Path(snakemake.output.evidence),
        limits=snakemake.params.limits,
        accept=snakemake.params.accept,
    )
