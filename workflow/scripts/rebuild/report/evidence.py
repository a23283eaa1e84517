"""Reads what the report is made from: the audits' evidence, approvals, manifests, and the times that jobs took.

Evidence may be of an older version or of data made elsewhere: keys that are missing, or are not what they should be,
are read as absent. Of thousands of shards only a few examples each are kept.
"""

import csv
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

PASS, FAIL, WAIVED, UNJUDGED = "pass", "fail", "waived", "not judged"
CASES = {FAIL: 5}  # examples kept of a check in one shard
OTHER_CASES = 2
CONVERSATIONS = 8  # kept of one shard
READ_SHARDS = 50  # so many that failed, and so many others, keep their conversations
LIMITED_TEXT = 20_000  # characters of one text

Evidence = dict[str, Any]


@dataclass(frozen=True)
class Judged:
    """One shard (or the canary, or the whole run) with its verdict, its waiver's reason, and its evidence."""

    name: str
    verdict: str
    reason: str | None
    evidence: Evidence
    note: str = ""

    @property
    def checks(self) -> list[Evidence]:
        """The checks of this shard that have a name."""
        found = [mapping(check) for check in sequence(self.evidence.get("checks"))]
        return [check for check in found if isinstance(check.get("name"), str)]


@dataclass(frozen=True)
class JobTimes:
    """The seconds that the jobs of one rule took, each in its last attempt."""

    rule: str
    jobs: int
    seconds: float
    longest: float


def mapping(value: Any) -> dict[str, Any]:
    """Return `value` if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def is_number(value: Any) -> bool:
    """Say whether `value` is a number that can be added up and shown."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def integer(value: Any) -> int:
    """Return `value` as a whole number, 0 if it is none."""
    return int(value) if is_number(value) else 0


def read_json_leniently(path: Path) -> Any:
    """Return the parsed JSON file, None if there is none or it is not JSON; halves of surrogate pairs are let in."""
    try:
        content = path.read_bytes()
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return json.loads(content.decode("utf-8", "surrogatepass"))
    except (OSError, ValueError, RecursionError):
        return None


def read_judged(paths: Iterable[Path], accept: dict[str, str]) -> list[Judged]:
    """Return every shard's evidence and verdict, in the order of `paths`; approvals lie beside the evidence.

    `accept` maps shards to the reasons for which they are waived: what is configured counts even before it is approved.
    """
    judged, read = [], {True: 0, False: 0}
    for path in paths:
        part = read_shard(path, accept)
        read[part.verdict == FAIL] += 1
        if read[part.verdict == FAIL] > READ_SHARDS:
            part.evidence["examples"] = []
        judged.append(part)
    return judged


def read_shard(path: Path, accept: dict[str, str]) -> Judged:
    """Return one shard's evidence, cut to what is shown, and its verdict; both are never missing."""
    evidence = mapping(read_json_leniently(path))
    approval = mapping(read_json_leniently(path.with_suffix(".approved")))
    name = str(evidence.get("shard") or path.stem)
    verdict, reason = evidence.get("verdict"), None
    if verdict == FAIL:
        reason = waiver(evidence, approval) or accept.get(name)
        verdict = WAIVED if reason else FAIL
    note = "" if evidence else f"{path.name} is missing or cannot be read"
    known = verdict if verdict in (PASS, FAIL, WAIVED) else UNJUDGED
    return Judged(name, known, reason, cut(evidence), note)


def waiver(evidence: Evidence, approval: Evidence) -> str | None:
    """Return the reason of a waiver that is for this very data."""
    same = approval.get("tokenized_sha256") == evidence.get("tokenized_sha256")
    return str(approval.get("reason")) if same and approval.get("verdict") == WAIVED else None


def cut(evidence: Evidence) -> Evidence:
    """Return the evidence with a few examples of each kind; texts that all shards share are held once."""
    checks = []
    for check in map(mapping, sequence(evidence.get("checks"))):
        shared = {key: sys.intern(text) for key, text in check.items() if type(text) is str}
        kept = CASES.get(shared.get("verdict", ""), OTHER_CASES)
        checks.append(check | shared | {"evidence": sequence(check.get("evidence"))[:kept]})
    examples = [mapping(row) for row in sequence(evidence.get("examples"))[:CONVERSATIONS]]
    return evidence | {"checks": checks, "examples": [cut_texts(row) for row in examples]}


def cut_texts(row: Evidence) -> Evidence:
    """Return the row with texts that no page should hold whole ended early, visibly."""
    return {
        key: f"{text[:LIMITED_TEXT]} … ({len(text):,} characters)"
        if isinstance(text, str) and len(text) > LIMITED_TEXT
        else text
        for key, text in row.items()
    }


def read_times(benchmarks: Path) -> list[JobTimes]:
    """Return the times of every rule that has Snakemake's benchmark files below the folder, the longest first."""
    found: dict[str, list[float]] = {}
    for path in sorted(benchmarks.rglob("*.tsv")):
        rule = path.relative_to(benchmarks).parts[0].removesuffix(".tsv")
        if (seconds := read_seconds(path)) is not None:
            found.setdefault(rule, []).append(seconds)
    times = [JobTimes(rule, len(each), sum(each), max(each)) for rule, each in found.items()]
    return sorted(times, key=lambda rule: -rule.seconds)


def read_seconds(path: Path) -> float | None:
    """Return the time in the last line of a benchmark file, None if there is none."""
    with open(path, encoding="utf-8", errors="replace", newline="") as handle:
        rows = list(csv.DictReader(handle, delimiter="\t"))
    try:
        return float(rows[-1]["s"])
    except (IndexError, KeyError, TypeError, ValueError):
        return None
