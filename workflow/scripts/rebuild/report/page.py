"""Puts the report's page together: evidence in, one self-contained HTML text out.

The page runs no script and loads nothing: its policy (Content-Security-Policy) allows its own style sheet, by hash, and
nothing else. Every text that comes from data is escaped by the template engine and made visible (`report.text`).
"""

import base64
import hashlib
import importlib.metadata
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rebuild.report import charts, text
from rebuild.report.checks import CheckRow, join_checks
from rebuild.report.evidence import (
    FAIL,
    PASS,
    UNJUDGED,
    WAIVED,
    Evidence,
    JobTimes,
    Judged,
    integer,
    mapping,
    sequence,
)
from rebuild.report.inputs import WHOLE_RUN
from rebuild.report.lengths import CHARTS, draw_charts
from rebuild.report.totals import (
    sum_counts,
    sum_sources,
    sum_spread,
)
from rebuild.shards import CANARY
from rebuild.start.recipe import flatten

TEMPLATES = Path(__file__).parents[3] / "report"
STATUSES = ["ok", "truncated", "tool_calls", "skipped", "error"]
SHOWN_CONVERSATIONS = 8
SHOWN_DRIFTS = 8
SHOWN_SOURCES = 60
LARGE_CELLS = 64  # up to so many shards, the cells of the grid have their names in them
RUN_TITLE = "The run as a whole"
LIBRARIES = ["sglang", "transformers", "torch", "pyarrow", "snakemake"]


@dataclass(frozen=True)
class Paperwork:
    """What the run is made from and with; each is empty where the file is not there."""

    run: str
    prompts: Evidence
    model: Evidence
    recipe: Evidence
    times: list[JobTimes]


def render_page(judged: list[Judged], papers: Paperwork) -> str:
    """Return the page."""
    style = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=text.shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = text.duration
    environment.globals |= {
        "percent": text.percent,
        "plural": text.plural,
        "share": charts.draw_share,
    }
    facts = page_facts(judged, papers)
    return environment.get_template("report.html.j2").render(style=style, digest=digest, **facts)


def page_facts(judged: list[Judged], papers: Paperwork) -> dict[str, Any]:
    """Return everything that the template shows, by name."""
    parts = [each for each in judged if each.name != WHOLE_RUN]
    evidence = [each.evidence for each in parts]
    rows = sum_counts(each.get("rows") for each in evidence)
    charts, groups = draw_charts(evidence), check_groups(judged)
    return {
        "verdict": overall_verdict(judged),
        "counts": {
            name: sum(each.verdict == name for each in parts)
            for name in (PASS, FAIL, WAIVED, UNJUDGED)
        },
        "parts": [part_facts(each) for each in judged],
        "large_cells": len(judged) <= LARGE_CELLS,
        "shards": len(parts),
        "waived": [each for each in judged if each.verdict == WAIVED],
        "broken": [each for each in judged if each.verdict == UNJUDGED],
        "groups": groups,
        "findings": findings(groups),
        "rows": rows,
        "statuses": {name: rows.get(name, 0) for name in STATUSES if name in rows},
        "dropped": sum_counts(mapping(each.get("rows")).get("dropped") for each in evidence),
        "finish_reasons": sum_distribution_counts(evidence, "finish_reason"),
        "charts": charts,
        "missing_charts": [
            title for title, *_ in CHARTS if title not in {chart.title for chart in charts}
        ],
        "sources": source_facts(evidence),
        "drift": drift_facts(parts),
        "conversations": choose_conversations(parts),
        "speeds": token_facts(evidence, papers.times),
    } | paper_facts(papers)


def paper_facts(papers: Paperwork) -> dict[str, Any]:
    """Return what the template shows of what the run is made from and with."""
    sources = map(mapping, sequence(papers.prompts.get("sources")))
    return {
        "run": papers.run,
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "papers": papers,
        "rejected": sum_counts([papers.prompts.get("rejected_reasons")]),
        "prompt_files": [
            (source.get("path"), str(source.get("sha256") or "")[:12]) for source in sources
        ],
        "settings": recipe_settings(papers.recipe),
        "versions": installed_versions(),
    }


def overall_verdict(judged: list[Judged]) -> str:
    """Return the run's verdict: fail if anything fails, then not judged, then waived."""
    verdicts = {each.verdict for each in judged}
    for verdict in (FAIL, UNJUDGED, WAIVED):
        if verdict in verdicts:
            return verdict
    return PASS if verdicts else UNJUDGED


def part_facts(part: Judged) -> dict[str, Any]:
    """Return what the grid and the table of shards show of one of them."""
    failed = [check["name"] for check in part.checks if check.get("verdict") == FAIL]
    masks = mapping(mapping(part.evidence.get("distribution")).get("mask_sum"))
    return {
        "name": part.name,
        "verdict": part.verdict,
        "reason": part.reason,
        "note": part.note,
        "failed": failed,
        "rows": integer(mapping(part.evidence.get("rows")).get("tokenized")),
        "loss_tokens": integer(masks.get("total")),
        "sha256": str(part.evidence.get("tokenized_sha256") or "")[:12],
    }


def check_groups(judged: list[Judged]) -> list[tuple[str, list[CheckRow]]]:
    """Return the checks of the shards, of the canary among them, and of the run as a whole, where there are any."""
    shards = [each for each in judged if each.name not in (CANARY, WHOLE_RUN)]
    groups = {
        "All shards together" if len(shards) > 1 else "The shard": shards,
        "The canary": [each for each in judged if each.name == CANARY],
        RUN_TITLE: [each for each in judged if each.name == WHOLE_RUN],
    }
    joined = [(title, join_checks(members)) for title, members in groups.items()]
    return [(title, rows) for title, rows in joined if rows]


def findings(groups: list[tuple[str, list[CheckRow]]]) -> list[tuple[str, CheckRow]]:
    """Return the checks that failed, the worst first, each with where it did if that is not the shards.

    What the whole run adds up is not told again where a shard or the canary has failed by it.
    """
    found: dict[str, tuple[str, CheckRow]] = {}
    for place, (title, checks) in enumerate(groups):
        for check in checks:
            known = title == RUN_TITLE and check.name in {row.name for _, row in found.values()}
            if check.failed and not known:
                found[f"{title}: {check.name}"] = (title.lower() if place else "", check)
    return sorted(found.values(), key=lambda finding: -finding[1].severity)


def sum_distribution_counts(evidence: list[Evidence], name: str) -> dict[str, int]:
    """Return one distribution of names over all shards, the most frequent first."""
    total = sum_counts(mapping(each.get("distribution")).get(name) for each in evidence)
    return dict(sorted(total.items(), key=lambda pair: -pair[1]))


def source_facts(evidence: list[Evidence]) -> dict[str, Any]:
    """Return the yield of the largest sources, what the others have together, and the totals."""
    ordered = sorted(sum_sources(evidence).items(), key=lambda pair: -pair[1]["generated"])
    shown, others = ordered[:SHOWN_SOURCES], ordered[SHOWN_SOURCES:]
    return {
        "shown": dict(shown),
        "others": sum_counts(counts for _, counts in others),
        "count_of_others": len(others),
        "total": sum_counts(counts for _, counts in ordered),
    }


def drift_facts(parts: list[Judged]) -> dict[str, Any] | None:
    """Return how many rows other ids would come out for if their text were tokenized again, with examples."""
    found = [
        (part.name, mapping(mapping(part.evidence.get("distribution")).get("retokenization")))
        for part in parts
    ]
    reports = [(name, report) for name, report in found if report]
    if not reports:
        return None
    examples = [
        mapping(example) | {"shard": name}
        for name, report in reports
        for example in sequence(report.get("examples"))
    ]
    return {
        "rows": sum(integer(report.get("rows")) for _, report in reports),
        "differing": sum(integer(report.get("differing")) for _, report in reports),
        "examples": examples[:SHOWN_DRIFTS],
    }


def choose_conversations(parts: list[Judged]) -> list[dict[str, Any]]:
    """Return some rows to read: of failed shards first, every source and status once before any comes again."""
    ordered = sorted(parts, key=lambda part: part.verdict != FAIL)
    rows = [
        {"shard": part.name, **dict.fromkeys(("sample_id", "source", "status"), ""), **row}
        for part in ordered
        for row in part.evidence["examples"]
    ]
    first: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    for row in rows:
        kind = str(row["source"]), str(row["status"])
        (again if kind in seen else first).append(row)
        seen.add(kind)
    return [*first, *again][:SHOWN_CONVERSATIONS]


def token_facts(
    evidence: list[Evidence], times: list[JobTimes]
) -> list[tuple[str, int, JobTimes | None]]:
    """Return, for the expensive phases, what they handled in tokens and the time of their jobs."""
    by_rule = {each.rule: each for each in times}
    lengths, masks = sum_spread(evidence, "seq_len"), sum_spread(evidence, "mask_sum")
    facts = []
    if masks:
        facts.append(
            ("supervised tokens, from generate_shard", masks.total, by_rule.get("generate_shard"))
        )
    if lengths:
        states = by_rule.get("extract_hidden_states")
        facts.append(("tokens in rows, for extract_hidden_states", lengths.total, states))
    return facts


def recipe_settings(recipe: Evidence) -> list[tuple[str, str, str, str]]:
    """Return phase, setting, value and the phase's fingerprint of everything in the recipe."""
    lines = []
    for phase, part in mapping(recipe.get("phases")).items():
        fingerprint = str(mapping(part).get("fingerprint") or "")[:12]
        for key, value in flatten(mapping(mapping(part).get("settings"))).items():
            lines.append((str(phase), key, "null" if value is None else str(value), fingerprint))
    return lines


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that make the data, as they are installed here."""
    versions = {"Python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed here"
    return versions
