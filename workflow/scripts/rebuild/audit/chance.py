"""How many rows chance may put over a limit, so that a small shard is not condemned by noise."""

import math
from bisect import bisect_left

CHANCE = 0.001  # a set that is exactly at its limit is condemned less often than this


def allowed_count(limit: float, rows: int, chance: float = CHANCE) -> int:
    """Return the largest number of `rows` that a true share of `limit` explains.

    One more would be seen by chance with a probability under `chance` (one-sided exact binomial
    test). With limit 0.1: 4 of 8, 6 of 16, 132 of 1,000, 101,000 of 1,000,000; with limit 0: 0.
    """
    first = math.floor(limit * rows)
    if limit <= 0 or limit >= 1:
        return first
    candidates = range(first, rows)
    # The tail falls as the count grows: find the first count that chance makes too rarely exceeds.
    step = bisect_left(candidates, -chance, key=lambda k: -binomial_tail(k + 1, rows, limit))
    return first + step


def binomial_tail(count: int, rows: int, share: float) -> float:
    """Return the probability of `count` or more successes in `rows` trials of probability `share`.

    For counts above `rows * share`, where the terms fall from the first one on.
    """
    total = 0.0
    for k in range(count, rows + 1):
        term = math.exp(
            math.lgamma(rows + 1)
            - math.lgamma(k + 1)
            - math.lgamma(rows - k + 1)
            + k * math.log(share)
            + (rows - k) * math.log1p(-share)
        )
        total += term
        if term < 1e-12 * total or term == 0.0:
            break
    return total
