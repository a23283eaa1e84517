"""How lengths, finish reasons and sources are distributed in a set, for the evidence and the report."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rebuild.audit.digest import numbers
from rebuild.audit.facts import ANSWERED, STATUSES
from rebuild.audit.set_checks import source_yields

QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
# The same in every set, so that histograms add up: powers of two and the half-way points between them.
EDGES = (0, 1, 2, 3, *(edge for power in range(2, 18) for edge in (2**power, 3 * 2 ** (power - 1))))
LENGTHS = ("mask_sum", "seq_len", "prompt_tokens", "reasoning_tokens", "answer_tokens")


def distribution(digest: pa.Table) -> dict[str, Any]:
    """Return the distributions of a set: lengths in tokens, finish reasons, sources."""
    known = {name: known_values(digest, name) for name in LENGTHS}
    return {
        **{name: spread(values) for name, values in known.items() if len(values)},
        "finish_reason": tally(digest["finish_reason"]),
        "sources": sources(digest),
    }


def known_values(digest: pa.Table, name: str) -> NDArray[Any]:
    """Return a column's values without those that are not known."""
    values = numbers(digest, name)
    known: NDArray[Any] = values[values >= 0]
    return known


def spread(values: NDArray[Any]) -> dict[str, Any]:
    """Return rows, total, quantiles, the most frequent values and a histogram with the edges EDGES.

    Bin i of the histogram holds the values from edge i to before edge i + 1, the last one all that are larger.
    """
    bins = np.searchsorted(EDGES, values, side="right") - 1
    quantiles = np.quantile(values, QUANTILES) if len(values) else []
    return {
        "rows": len(values),
        "total": int(values.sum(dtype=np.int64)),
        "quantiles": {f"{q:g}": float(v) for q, v in zip(QUANTILES, quantiles, strict=False)},
        "most_frequent": most_frequent(values, 10),
        "histogram": {
            "edges": list(EDGES),
            "rows": np.bincount(bins, minlength=len(EDGES)).tolist(),
        },
    }


def most_frequent(values: NDArray[Any], count: int) -> list[dict[str, int]]:
    """Return the `count` most frequent values, each with its number of rows; ties by value."""
    distinct, rows = np.unique(values, return_counts=True)
    order = np.lexsort((distinct, -rows))[:count]
    return [{"value": int(distinct[i]), "rows": int(rows[i])} for i in order]


def tally(column: Any) -> dict[str, int]:
    """Return the number of rows of every value, by name; missing ones as "none"."""
    texts = column.cast(pa.string()).fill_null("none")
    counts = {item["values"]: item["counts"] for item in texts.value_counts().to_pylist()}
    return dict(sorted(counts.items()))


def sources(digest: pa.Table) -> dict[str, dict[str, int]]:
    """Return for each source its prompts, rows generated, answered and trained, and supervised tokens."""
    table = pa.table(
        {
            "source": digest["source"].cast(pa.string()).fill_null(""),
            "prompt": digest["prompt_key"],
            "answered": np.isin(
                digest["status"].cast(pa.string()).to_numpy(zero_copy_only=False), ANSWERED
            ),
            "tokens": np.maximum(numbers(digest, "mask_sum"), 0),
        }
    )
    sums = table.group_by("source").aggregate(
        [("prompt", "count_distinct"), ("answered", "sum"), ("tokens", "sum")]
    )
    yields = source_yields(digest)
    return {
        row["source"]: {
            "prompts": row["prompt_count_distinct"],
            "generated": yields[row["source"]][1],
            "answered": row["answered_sum"] or 0,
            "trained": yields[row["source"]][0],
            "loss_tokens": row["tokens_sum"] or 0,
        }
        for row in sorted(sums.to_pylist(), key=lambda row: str(row["source"]))
    }


def count_rows(digest: pa.Table, prompts: int, counts: dict[str, Any]) -> dict[str, Any]:
    """Return how many prompts there are, and how many rows generated (in all and by status), tokenized and dropped."""
    status = tally(digest["status"])
    return {
        "prompts": prompts,
        "generated": len(digest),
        **{name: status.get(name, 0) for name in STATUSES},
        "tokenized": int(numbers(digest, "trained").sum()),
        "dropped": counts.get("dropped", {}),
    }
