"""Make the page for people who would rather look: what the audit found, in one self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path

from rebuild.files import atomic_path
from rebuild.report.evidence import (
    mapping,
    read_json_leniently,
    read_judged,
    read_times,
)
from rebuild.report.page import Paperwork, render_page
from rebuild.step import begin_step, say


def make_report(
    evidence: Sequence[Path], report: Path, *, results: Path, accept: dict[str, str]
) -> None:
    """Write `report` from the audits' `evidence` and from what else there is in the run's folder `results`.

    Nothing but the evidence has to be there, and shards that failed are shown as such. `accept` maps
    shards to the reasons for which they are waived.
    """
    judged = read_judged(evidence, accept)
    papers = Paperwork(
        run=results.name,
        prompts=mapping(read_json_leniently(results / "prompts" / "manifest.json")),
        model=mapping(read_json_leniently(results / "model" / "manifest.json")),
        recipe=mapping(read_json_leniently(results / "recipe.json")),
        times=read_times(results / "benchmarks"),
    )
    page = render_page(judged, papers)
    with atomic_path(report) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")
    say(f"{report}: {len(judged)} audits, {len(page):,} characters")


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    make_report(
        evidence=[Path(path) for path in snakemake.input.evidence],
        report=Path(snakemake.output.report),
        results=Path(snakemake.params.results),
        accept=snakemake.params.accept,
    )
