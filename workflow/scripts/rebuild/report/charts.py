"""Draws the report's charts as inline SVG: no script, no style attribute, every text escaped.

Colours and sizes of text are the style sheet's, by class, so that charts follow the reader's colour scheme.
"""

import math
from dataclasses import dataclass

from markupsafe import Markup

from rebuild.report.text import compact, percent, plural, token_edge
from rebuild.report.totals import Histogram

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 30, 54
FAINT = 1.5  # a bar that is lower than this gets a mark below the axis
LABELS = 8  # at most, on the horizontal axis


@dataclass(frozen=True)
class Frame:
    """Where the bars stand: the width of one, and the height of one row."""

    bars: int
    top_value: float

    @property
    def step(self) -> float:
        """The width of one bar with its gap."""
        return (WIDTH - LEFT - RIGHT) / max(self.bars, 1)

    def x(self, index: int) -> float:
        """Return where bar `index` begins."""
        return LEFT + index * self.step

    def y(self, value: float) -> float:
        """Return the height at which `value` is drawn."""
        return HEIGHT - BOTTOM - value / self.top_value * (HEIGHT - TOP - BOTTOM)


def draw_histogram(
    histogram: Histogram, *, title: str, unit: str, top: int | None = None
) -> Markup:
    """Return a histogram with equally wide bins; bars that share an axis are given the same `top` (rows)."""
    highest = top or max(histogram.rows, default=0)
    ticks = nice_ticks(highest)
    frame = Frame(len(histogram.rows), max(ticks[-1], highest, 1))
    parts = [
        rows_axis(frame, ticks),
        draw_bars(frame, histogram, unit),
        values_axis(frame, histogram, unit),
    ]
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title>{}</svg>'
    ).format(WIDTH, HEIGHT, spoken(histogram, title, unit), title, Markup("").join(parts))


def spoken(histogram: Histogram, title: str, unit: str) -> str:
    """Return the chart in a sentence, for those who hear it."""
    total = sum(histogram.rows)
    if not total:
        return f"{title}: no rows"
    fullest = max(range(len(histogram.rows)), key=histogram.rows.__getitem__)
    most = f"{percent(histogram.rows[fullest], total)} of {plural(total, 'row')}"
    return f"{title}: histogram; the fullest bin, {histogram.named(fullest)} {unit}, holds {most}"


def nice_ticks(highest: float) -> list[float]:
    """Return round numbers from 0 up to at least `highest`, at most five; whole ones, since rows are counted."""
    rough = max(highest, 1) / 4
    size = 10 ** math.floor(math.log10(rough))
    step = max(1, next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough))
    step = math.ceil(step)
    return [step * number for number in range(math.ceil(max(highest, 1) / step) + 1)]


def rows_axis(frame: Frame, ticks: list[float]) -> Markup:
    """Return the vertical axis: lines with the number of rows, and what they count."""
    lines = [
        Markup(
            '<line class="rule" x1="{}" x2="{}" y1="{y}" y2="{y}"/>'
            '<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>'
        ).format(
            LEFT,
            WIDTH - RIGHT,
            LEFT - 8,
            _px(frame.y(tick) + 4),
            compact(tick),
            y=_px(frame.y(tick)),
        )
        for tick in ticks
    ]
    name = Markup('<text class="axis" x="{}" y="{}" text-anchor="end">rows</text>')
    return Markup("").join([*lines, name.format(LEFT - 8, TOP - 14)])


def draw_bars(frame: Frame, histogram: Histogram, unit: str) -> Markup:
    """Return the bars, each with its numbers as a tooltip; those too low to see are marked below the axis."""
    base, total = frame.y(0), sum(histogram.rows)
    gap = min(2.0, frame.step / 5)
    bars = []
    for index, rows in enumerate(histogram.rows):
        place = {"x": _px(frame.x(index) + gap / 2), "width": _px(frame.step - gap)}
        label = f"{histogram.named(index)} {unit}: {plural(rows, 'row')} ({percent(rows, total)})"
        bars.append(_bar("bar", label, place, frame.y(rows), base - frame.y(rows), rows))
        if rows and base - frame.y(rows) < FAINT:
            bars.append(_bar("faint", label, place, base + 2, 3, rows))
    return Markup("").join(bars)


def _bar(
    kind: str, label: str, place: dict[str, str], y: float, height: float, rows: int
) -> Markup:
    return Markup(
        '<rect class="{}" x="{x}" y="{}" width="{width}" height="{}" data-rows="{}"><title>{}</title></rect>'
    ).format(kind, f"{y:.4f}", f"{height:.4f}", rows, label, **place)


def values_axis(frame: Frame, histogram: Histogram, unit: str) -> Markup:
    """Return the horizontal axis: the lowest value of every bin, as many as have room, and the unit."""
    marks = [
        Markup(
            '<line class="mark" x1="{x}" x2="{x}" y1="{}" y2="{}"/>'
            '<text class="tick{}" x="{x}" y="{}" text-anchor="middle">{}</text>'
        ).format(
            _px(frame.y(0)),
            _px(frame.y(0) + 6),
            " minor" if place % 2 else "",
            HEIGHT - BOTTOM + 20,
            token_edge(histogram.edges[index]),
            x=_px(frame.x(index)),
        )
        for place, index in enumerate(labelled(histogram.edges))
    ]
    line = Markup('<line class="base" x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(
        LEFT, WIDTH - RIGHT, y=_px(frame.y(0))
    )
    name = Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>')
    middle = _px((LEFT + WIDTH - RIGHT) / 2)
    return Markup("").join([*marks, line, name.format(middle, HEIGHT - 10, unit)])


def labelled(edges: tuple[float, ...]) -> range:
    """Return the numbers of the edges that are labelled, at even distances, on powers of two where that is possible."""
    every = 1
    while math.ceil(len(edges) / every) > LABELS:
        every *= 2
    choices = [range(first, len(edges), every) for first in range(every)]
    return max(choices, key=lambda numbers: sum(math.log2(edges[n] or 1) % 1 == 0 for n in numbers))


def draw_share(part: float, whole: float) -> Markup:
    """Return a bar as long as `part` is of `whole`; the number stands beside it in the table, so it is not spoken."""
    width = 100 * min(part / whole, 1) if whole else 0
    return Markup(
        '<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true" focusable="false">'
        '<rect class="room" width="100" height="8"/><rect class="bar" width="{}" height="8"/></svg>'
    ).format(f"{width:.4f}")


def _px(value: float) -> str:
    """Return a coordinate with two decimals."""
    return f"{value:.2f}"
