"""The verdict on a set of rows: limits applied to what the checks found, and the worst of it in words."""

import difflib
import math
from typing import Any

from rebuild.chance import allowed_count
from rebuild.checks import CHECKS, Check, Finding
from rebuild.errors import StepError
from rebuild.facts import Facts, count_rows, distribution

SCHEMA_VERSION = "1"
UNITS = {"rows": "rows", "share": "share of rows", "median": "tokens, at least"}

Judgement = dict[str, Any]


def judge(facts: Facts, limits: dict[str, float]) -> dict[str, Any]:
    """Return verdict, row counts, checks and distributions of `facts`, ready to be written as JSON.

    `limits` replaces the default limit of the checks that it names.

    Raises:
        StepError: `limits` names a check that does not exist.
    """
    check_limits(limits)
    checks = [
        apply_limit(check, check.find(facts), limits.get(check.name, check.default))
        for check in CHECKS
    ]
    failed = any(check["verdict"] == "fail" for check in checks)
    return {
        "verdict": "fail" if failed else "pass",
        "rows": count_rows(facts),
        "checks": checks,
        "distribution": distribution(facts),
    }


def check_limits(limits: dict[str, float]) -> None:
    """Refuse a limit for a check that does not exist.

    Raises:
        StepError: names the nearest check.
    """
    names = [check.name for check in CHECKS]
    for name in limits:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise StepError(
                f"audit.limits has no check {name!r}",
                expected=", ".join(names),
                remedy=f"did you mean {near[0]!r}?" if near else "",
            )


def apply_limit(check: Check, finding: Finding, limit: float) -> Judgement:
    """Return the judgement of one check.

    A share fails when more rows are affected than chance explains at the limit
    (`chance.allowed_count`), a median when even its upper bound is below the limit, so that small
    shards are not condemned by noise; `rows` has no such allowance.
    """
    if check.kind == "median":
        value, allowed, failed = finding.value, None, finding.bound < limit
        severity = limit / max(value, 1e-9)
    else:
        share = finding.count / finding.of if finding.of else math.nan
        value = finding.count if check.kind == "rows" else share
        allowed = math.floor(limit) if check.kind == "rows" else allowed_count(limit, finding.of)
        failed = finding.count > allowed
        severity = value / limit if limit > 0 else float(finding.count)
    return {
        "name": check.name,
        "verdict": "fail" if failed else "pass",
        "value": None if math.isnan(value) else round(value, 6),
        "limit": limit,
        "unit": UNITS[check.kind],
        "severity": 0.0 if math.isnan(severity) else round(severity, 3),
        "count": finding.count,
        "of": finding.of,
        "allowed": allowed,
        "seen": finding.seen,
        "why": check.why,
        "evidence": [{"sample_id": sample, "seen": seen} for sample, seen in finding.cases],
    }


def worst_reasons(checks: list[Judgement], count: int = 3) -> list[Judgement]:
    """Return the failed checks that are furthest over their limits, the worst first."""
    failed = [check for check in checks if check["verdict"] == "fail"]
    return sorted(failed, key=lambda check: -check["severity"])[:count]


def beyond_limit(checks: list[Judgement]) -> list[Judgement]:
    """Return the checks that pass although their value is beyond the limit, because chance explains it."""
    return [check for check in checks if check["verdict"] == "pass" and check["severity"] > 1]


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
