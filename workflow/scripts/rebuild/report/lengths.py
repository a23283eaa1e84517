"""The histograms of the report: which distributions there are, cut to the bins that matter, with the numbers beside them."""

from dataclasses import dataclass

from markupsafe import Markup

from rebuild.report.charts import draw_histogram
from rebuild.report.evidence import Evidence
from rebuild.report.totals import Spread, median_bin, sum_spread, used_bins

LEAST_BINS = 8  # shown of a histogram, so that one full bin does not look like the whole axis

# Title, distribution, unit, and the group of charts that share their axes.
CHARTS = [
    ("Supervised tokens per row", "mask_sum", "supervised tokens per row", "mask_sum"),
    ("Sequence length", "seq_len", "tokens per row", "seq_len"),
    ("Reasoning", "reasoning_tokens", "reasoning tokens per row", "answer"),
    ("Answer", "answer_tokens", "answer tokens per row", "answer"),
    ("Prompt length", "prompt_tokens", "prompt tokens per row", "prompt_tokens"),
]


@dataclass(frozen=True)
class Chart:
    """A histogram with the numbers that are read beside it; `picture` is None where there are no bins."""

    title: str
    unit: str
    spread: Spread
    picture: Markup | None
    median: str


def draw_charts(evidence: list[Evidence]) -> list[Chart]:
    """Return the histograms of all distributions that there are; those of a group have the same axes."""
    spreads = {name: sum_spread(evidence, name) for _, name, _, _ in CHARTS}
    charts = []
    for title, name, unit, group in CHARTS:
        if spread := spreads[name]:
            together = [spreads[other] for _, other, _, its in CHARTS if its == group]
            charts.append(draw_chart(title, unit, spread, [each for each in together if each]))
    return charts


def draw_chart(title: str, unit: str, spread: Spread, together: list[Spread]) -> Chart:
    """Return one histogram, cut to the bins that it or the others on the same axes have rows in."""
    histogram = spread.histogram
    bins = used_bins(each.histogram for each in together)
    if (
        histogram is None
        or bins is None
        or len({e.histogram.edges for e in together if e.histogram}) > 1
    ):
        return Chart(title, unit, spread, None, "")
    bins = widened(bins, len(histogram.rows))
    top = max(max(each.histogram.rows) for each in together if each.histogram)
    picture = draw_histogram(histogram.between(*bins), title=title, unit=unit, top=top)
    middle = median_bin(histogram)
    return Chart(title, unit, spread, picture, "" if middle is None else histogram.named(middle))


def widened(bins: tuple[int, int], count: int) -> tuple[int, int]:
    """Return the first and last of at least `LEAST_BINS` bins around these, as far as there are as many."""
    first, last = bins
    while last - first + 1 < min(LEAST_BINS, count):
        first, last = max(first - 1, 0), min(last + 1, count - 1)
    return first, last
