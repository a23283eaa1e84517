"""Adds up the evidence of many shards: rows, counts by name, sources, and distributions whose bins are the same."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rebuild.report.evidence import Evidence, integer, is_number, mapping, sequence

SOURCE_COLUMNS = ["prompts", "generated", "answered", "trained", "loss_tokens"]


@dataclass(frozen=True)
class Histogram:
    """Rows per bin; bin i holds values from `edges[i]` up to, not including, `edges[i + 1]`; the last may be open."""

    edges: tuple[float, ...]
    rows: tuple[int, ...]

    def bounds(self, index: int) -> tuple[float, float | None]:
        """Return the bin's lowest value and where the next bin begins, None if there is none."""
        return self.edges[index], self.edges[index + 1] if index + 1 < len(self.edges) else None

    def named(self, index: int) -> str:
        """Return the whole numbers that the bin holds: 4–7, 1, or ≥ 32,768."""
        low, high = self.bounds(index)
        if high is None:
            return f"≥ {low:,g}"
        return f"{low:,g}" if high - low <= 1 else f"{low:,g}–{high - 1:,g}"

    def between(self, first: int, last: int) -> "Histogram":
        """Return the bins from `first` to `last`, both included."""
        return Histogram(self.edges[first : last + 2], self.rows[first : last + 1])


@dataclass(frozen=True)
class Spread:
    """How one number of a row is distributed over all rows; `frequent` are values with their rows, at least."""

    rows: int
    total: int
    least: float | None
    most: float | None
    frequent: list[tuple[float, int]]
    histogram: Histogram | None

    @property
    def mean(self) -> float | None:
        """The mean of all rows."""
        return self.total / self.rows if self.rows else None


def sum_counts(counts: Iterable[Any]) -> dict[str, int]:
    """Return the sums of many mappings from names to numbers; what is no number is left out."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(
            {str(name): int(rows) for name, rows in mapping(each).items() if is_number(rows)}
        )
    return dict(total)


def sum_sources(evidence: Iterable[Evidence]) -> dict[str, dict[str, int]]:
    """Return prompts, answers, training rows and supervised tokens per source."""
    total: dict[str, Counter[str]] = {}
    for source, counts in _sources(evidence):
        row = total.setdefault(source, Counter(dict.fromkeys(SOURCE_COLUMNS, 0)))
        row.update({name: integer(counts.get(name)) for name in SOURCE_COLUMNS})
    return {source: dict(row) for source, row in total.items()}


def _sources(evidence: Iterable[Evidence]) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in evidence:
        for source, counts in mapping(mapping(each.get("distribution")).get("sources")).items():
            yield source, mapping(counts)


def sum_spread(evidence: Iterable[Evidence], name: str) -> Spread | None:
    """Return one distribution over all shards, None if no shard has it."""
    parts = [mapping(mapping(each.get("distribution")).get(name)) for each in evidence]
    parts = [part for part in parts if is_number(part.get("rows"))]
    if not parts:
        return None
    edges = [mapping(part.get("quantiles")) for part in parts]
    return Spread(
        rows=sum(integer(part["rows"]) for part in parts),
        total=sum(integer(part.get("total")) for part in parts),
        least=min((part["0"] for part in edges if is_number(part.get("0"))), default=None),
        most=max((part["1"] for part in edges if is_number(part.get("1"))), default=None),
        frequent=sum_frequent(parts),
        histogram=sum_histograms([mapping(part.get("histogram")) for part in parts]),
    )


def sum_frequent(parts: Iterable[Evidence]) -> list[tuple[float, int]]:
    """Return the values that most rows have; each shard names only its own, so the rows are lower bounds."""
    total: Counter[float] = Counter()
    for part in parts:
        for entry in map(mapping, sequence(part.get("most_frequent"))):
            if is_number(entry.get("value")):
                total[entry["value"]] += integer(entry.get("rows"))
    return sorted(total.items(), key=lambda pair: (-pair[1], pair[0]))[:5]


def sum_histograms(parts: list[Evidence]) -> Histogram | None:
    """Return the bins of all shards added up; None if a shard has no bins or other ones."""
    found = [checked_histogram(part) for part in parts]
    edges = {each.edges for each in found if each}
    if None in found or len(edges) != 1:
        return None
    columns = zip(*(each.rows for each in found if each), strict=True)
    return Histogram(edges.pop(), tuple(map(sum, columns)))


def checked_histogram(part: Evidence) -> Histogram | None:
    """Return a histogram of the evidence if it is one: rising edges, a number of rows per bin."""
    edges, rows = sequence(part.get("edges")), sequence(part.get("rows"))
    if not rows or len(edges) - len(rows) not in (0, 1):
        return None
    if not all(map(is_number, [*edges, *rows])) or any(a >= b for a, b in pairwise(edges)):
        return None
    return Histogram(tuple(edges), tuple(map(int, rows)))


def median_bin(histogram: Histogram) -> int | None:
    """Return the index of the bin that the middle row is in, None without rows."""
    middle, seen = (sum(histogram.rows) + 1) // 2, 0
    for index, rows in enumerate(histogram.rows):
        seen += rows
        if rows and seen >= middle:
            return index
    return None


def used_bins(histograms: Iterable[Histogram | None]) -> tuple[int, int] | None:
    """Return the first and last bin that any of the histograms has rows in, None if there are no rows at all."""
    used = [index for each in histograms if each for index, rows in enumerate(each.rows) if rows]
    return (min(used), max(used)) if used else None
