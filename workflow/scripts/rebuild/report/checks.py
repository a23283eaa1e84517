"""Joins the judgements of many shards: one row per check, its worst shard, and example samples."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rebuild.report.evidence import (
    FAIL,
    PASS,
    UNJUDGED,
    WAIVED,
    Evidence,
    Judged,
    is_number,
    mapping,
)
from rebuild.report.text import grouped, percentage

SHOWN_CASES = 8


@dataclass(frozen=True)
class Case:
    """A sample that a check names as an example."""

    shard: str
    sample_id: str
    seen: str


@dataclass(frozen=True)
class CheckRow:
    """One check over the shards of a group; `failed` and `waived` are those in which it failed, the worst first.

    `several` says whether the group has more than one shard, `worst` which one is nearest to the limit or over it.
    """

    name: str
    verdict: str
    value: str
    limit: str
    rows: str
    seen: str
    why: str
    judged: int
    failed: list[str]
    waived: list[str]
    several: bool
    worst: tuple[str, str] | None
    cases: list[Case]
    severity: float


Pair = tuple[Judged, Evidence]  # a shard, and what it says about one check


def join_checks(judged: list[Judged]) -> list[CheckRow]:
    """Return a row per check that any shard has, in the order in which they come up."""
    found: dict[str, list[Pair]] = {}
    for shard in judged:
        for check in shard.checks:
            found.setdefault(check["name"], []).append((shard, check))
    several = sum(bool(shard.checks) for shard in judged) > 1
    return [join_check(pairs, several) for pairs in found.values()]


def join_check(pairs: list[Pair], several: bool) -> CheckRow:
    """Return the row of one check; what was seen is told of the shard where it is furthest over its limit."""
    pairs = sorted(pairs, key=lambda pair: (not is_failed(pair), -severity(pair[1])))
    shard, check = pairs[0]
    failed = [
        each.name for each, its in pairs if of_verdict(its) == FAIL and each.verdict != WAIVED
    ]
    waived = [
        each.name for each, its in pairs if of_verdict(its) == FAIL and each.verdict == WAIVED
    ]
    return CheckRow(
        name=check["name"],
        verdict=joint_verdict([of_verdict(its) for _, its in pairs], failed, waived),
        value=joint_value([its for _, its in pairs]),
        limit=in_unit(check, check.get("limit"), at_least="at least" in unit_of(check)),
        rows=joint_rows([its for _, its in pairs]),
        seen=str(check.get("seen") or ""),
        why=str(check.get("why") or ""),
        judged=sum(of_verdict(its) != UNJUDGED for _, its in pairs),
        failed=failed,
        waived=waived,
        several=several,
        worst=(shard.name, in_unit(check, check.get("value")))
        if several and severity(check) > 0
        else None,
        cases=list(cases(pairs))[:SHOWN_CASES],
        severity=severity(check),
    )


def is_failed(pair: Pair) -> bool:
    """Say whether a check failed and nobody waived it."""
    return of_verdict(pair[1]) == FAIL and pair[0].verdict != WAIVED


def of_verdict(check: Evidence) -> str:
    """Return the check's verdict; one that is unknown is none."""
    verdict = check.get("verdict")
    return verdict if verdict in (PASS, FAIL) else UNJUDGED


def severity(check: Evidence) -> float:
    """Return how far the check's value is over its limit, below 0 where there is no value."""
    value: Any = check.get("severity")
    return float(value) if is_number(value) and of_verdict(check) != UNJUDGED else -1.0


def joint_verdict(verdicts: list[str], failed: list[str], waived: list[str]) -> str:
    """Return the verdict of a check over all shards."""
    if failed:
        return FAIL
    if waived:
        return WAIVED
    return PASS if PASS in verdicts else UNJUDGED


def unit_of(check: Evidence) -> str:
    """Return the check's unit, in lower case."""
    return str(check.get("unit") or "").lower()


def in_unit(check: Evidence, value: Any, *, at_least: bool = False) -> str:
    """Return a value or limit as it is read: shares in per cent, limits that are lower bounds with a sign."""
    if not is_number(value):
        return "–"
    unit = unit_of(check).partition(",")[0]
    shared = "share" in unit
    text = percentage(value) if shared else grouped(value)
    named = f" {unit}" if unit and not shared else ""
    return f"{'≥ ' if at_least else ''}{text}{named}"


def joint_value(checks: list[Evidence]) -> str:
    """Return a check's value over all shards: shares and counts of all rows, for anything else its range."""
    first, judged = checks[0], [check for check in checks if of_verdict(check) != UNJUDGED]
    values = [check["value"] for check in judged if is_number(check.get("value"))]
    counts = sum_of(judged, "count"), sum_of(judged, "of")
    if len(values) > 1 and unit_of(first).startswith("share") and None not in counts:
        return percentage(counts[0] / counts[1]) if counts[1] else "–"
    if len(values) > 1 and unit_of(first) == "rows":
        return in_unit(first, sum(values))
    if not values:
        return "–"
    low, high = in_unit(first, min(values)), in_unit(first, max(values))
    return low if low == high else f"{low.partition(' ')[0]} to {high}"


def joint_rows(checks: list[Evidence]) -> str:
    """Return how many rows are affected, of how many."""
    judged = [check for check in checks if of_verdict(check) != UNJUDGED]
    count, of = sum_of(judged, "count"), sum_of(judged, "of")
    return "–" if count is None or of is None or not judged else f"{count:,} of {of:,}"


def sum_of(checks: list[Evidence], key: str) -> Any:
    """Return the sum of a number that every check has, None if one lacks it."""
    values: list[Any] = [check.get(key) for check in checks]
    return sum(values) if all(map(is_number, values)) else None


def cases(pairs: list[Pair]) -> Iterable[Case]:
    """Yield example samples, those of failed shards first and one of each shard before the second of any."""
    named = [pair for pair in pairs if is_failed(pair)] or pairs
    longest = max((len(check["evidence"]) for _, check in named), default=0)
    for place in range(longest):
        for shard, check in named:
            if place < len(check["evidence"]):
                case = mapping(check["evidence"][place])
                yield Case(shard.name, str(case.get("sample_id")), str(case.get("seen") or ""))
