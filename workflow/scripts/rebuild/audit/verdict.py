"""The verdict on a set of rows: limits applied to what the checks found, and the worst of it in words."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rebuild.audit.chance import allowed_count
from rebuild.audit.checks import CHECKS, Check, Finding, add_findings
from rebuild.audit.digest import DIGEST, make_digest
from rebuild.audit.distribution import count_rows, distribution
from rebuild.audit.facts import Facts
from rebuild.audit.set_checks import SET_CHECKS, SetCheck
from rebuild.errors import StepError

SCHEMA_VERSION = "2"
UNITS = {
    "rows": "rows",
    "share": "share of rows",
    "median": "tokens, at least",
    "distance": "difference of shares",
}

Judgement = dict[str, Any]


@dataclass
class Found:
    """What is found in a set, part by part: findings of the checks of rows, and digests for those of the whole set.

    `excused` maps checks of the whole set to the numbers of the parts that they leave out.
    """

    findings: dict[str, list[Finding]] = field(default_factory=dict)
    digests: list[pa.Table] = field(default_factory=list)
    prompts: int = 0
    counts: dict[str, Any] = field(default_factory=dict)
    excused: dict[str, set[int]] = field(default_factory=dict)

    @property
    def digest(self) -> pa.Table:
        """The digest of all parts."""
        whole = self.digest_without(set())
        if not self.excused:
            self.digests = [whole]  # the parts are not needed beside it: a million rows are 180 MB
        return whole

    def digest_without(self, parts: set[int]) -> pa.Table:
        """Return the digest of all parts but these."""
        kept = [digest for part, digest in enumerate(self.digests) if part not in parts]
        empty = DIGEST.empty_table()
        return pa.concat_tables([empty, *kept]).unify_dictionaries().combine_chunks()


def look_at(parts: Iterable[Facts]) -> Found:
    """Return what the checks of rows find in the parts of a set, one part in memory at a time."""
    found = Found()
    for facts in parts:
        for check in CHECKS:
            finding = check.find(facts)
            if finding is not None:
                found.findings.setdefault(check.name, []).append(finding)
        found.digests.append(make_digest(facts))
        found.prompts += len(facts.prompts)
        found.counts |= facts.counts
    return found


def judge(
    found: Found, limits: dict[str, float], reference: pa.Table | None = None
) -> dict[str, Any]:
    """Return verdict, row counts, checks and distributions, ready to be written as JSON.

    `limits` replaces the default limit of the checks that it names; `reference` is the canary's digest.

    Raises:
        StepError: `limits` names a check that does not exist.
    """
    check_limits(limits)
    digest = found.digest
    sums = {name: add_findings(parts) for name, parts in found.findings.items()}
    judged = {name: found.digest_without(parts) for name, parts in found.excused.items()}
    checks = [
        *(apply_limit(check, sums.get(check.name), limits) for check in CHECKS),
        *(
            apply_limit(check, check.find(judged.get(check.name, digest), reference), limits)
            for check in SET_CHECKS
        ),
    ]
    failed = any(check["verdict"] == "fail" for check in checks)
    return {
        "verdict": "fail" if failed else "pass",
        "rows": count_rows(digest, found.prompts, found.counts),
        "checks": checks,
        "distribution": distribution(digest),
    }


def check_limits(limits: dict[str, float]) -> None:
    """Refuse a limit for a check that does not exist.

    Raises:
        StepError: names the nearest check.
    """
    names = [check.name for check in (*CHECKS, *SET_CHECKS)]
    for name in limits:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise StepError(
                f"audit.limits has no check {name!r}",
                expected=", ".join(names),
                remedy=f"did you mean {near[0]!r}?" if near else "",
            )


def apply_limit(
    check: Check | SetCheck, finding: Finding | None, limits: dict[str, float]
) -> Judgement:
    """Return the judgement of one check; without a finding it is not judged.

    A share fails when more rows are affected than chance explains at the limit
    (`chance.allowed_count`), a median or a distance when even its bound is beyond the limit, so that small
    shards are not condemned by noise; `rows` has no such allowance.
    """
    limit = limits.get(check.name, check.default)
    judgement: Judgement = {
        "name": check.name,
        "verdict": "not judged",
        "value": None,
        "limit": limit,
        "unit": UNITS[check.kind],
        "severity": 0.0,
        "count": 0,
        "of": 0,
        "allowed": None,
        "what": "",
        "seen": "nothing is there to judge it by",
        "why": check.why,
        "evidence": [],
    }
    if finding is None:
        return judgement
    value, allowed, failed, severity = measure(check.kind, finding, limit)
    return judgement | {
        "verdict": "fail" if failed else "pass",
        "value": None if math.isnan(value) else round(value, 6),
        "severity": 0.0 if math.isnan(severity) else round(severity, 3),
        "count": finding.count,
        "of": finding.of,
        "allowed": allowed,
        "what": finding.what,
        "seen": finding.seen,
        "evidence": [{"sample_id": sample, "seen": seen} for sample, seen in finding.cases],
    }


def measure(kind: str, finding: Finding, limit: float) -> tuple[float, int | None, bool, float]:
    """Return a finding's value, the count that its limit allows, whether it fails, and how many times over it is."""
    if kind == "median":
        return finding.value, None, finding.bound < limit, limit / max(finding.value, 1e-9)
    if kind == "distance":
        return finding.value, None, finding.bound > limit, finding.value / max(limit, 1e-9)
    share = finding.count / finding.of if finding.of else math.nan
    value = finding.count if kind == "rows" else share
    allowed = math.floor(limit) if kind == "rows" else allowed_count(limit, finding.of)
    severity = value / limit if limit > 0 else float(finding.count)
    return value, allowed, finding.count > allowed, severity


def worst_reasons(checks: list[Judgement], count: int = 3) -> list[Judgement]:
    """Return the failed checks that are furthest over their limits, the worst first."""
    failed = [check for check in checks if check["verdict"] == "fail"]
    return sorted(failed, key=lambda check: -check["severity"])[:count]


def beyond_limit(checks: list[Judgement]) -> list[Judgement]:
    """Return the checks that pass although their value is beyond the limit, because chance explains it."""
    return [check for check in checks if check["verdict"] == "pass" and check["severity"] > 1]


def judged_share(verdict: dict[str, Any]) -> str:
    """Return the verdict, and of how many checks it is: a pass of few is worth little."""
    checks = verdict["checks"]
    judged = sum(check["verdict"] != "not judged" for check in checks)
    return f"{verdict['verdict']} ({judged} of {len(checks)} checks judged)"


def verdict_lines(verdict: dict[str, Any]) -> list[str]:
    """Return in words what failed, what passed only because chance explains it, and what could not be judged."""
    checks = verdict["checks"]
    lines = [in_words(check) for check in worst_reasons(checks, len(checks))]
    lines += [
        f"passes, since chance explains as much in so few rows, but watch it: {in_words(check)}"
        for check in beyond_limit(checks)
    ]
    blind = [check["name"] for check in checks if check["verdict"] == "not judged"]
    return lines + ([f"not judged: {', '.join(blind)}"] if blind else [])


def in_words(check: Judgement, examples: int = 3) -> str:
    """Return a judgement as one line: name, value, limit, what was seen, and example samples."""
    samples = "; ".join(
        f"{case['sample_id']}: {case['seen']}" for case in check["evidence"][:examples]
    )
    line = f"{check['name']} {check['value']:g} (limit {check['limit']:g}, {check['unit']}): {check['seen']}"
    return f"{line}, such as {samples}" if samples else line


def shard_name(key: Any) -> str:
    """Return a shard as it is written in file names: five digits, whatever YAML or a command line made of them."""
    return f"{int(key):05d}" if str(key).isdecimal() else str(key)
