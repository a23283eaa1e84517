"""Which prompts go ahead of all others: a sample with the sources, turns and lengths of the whole.

Nothing in it is random: the same prompts in the same order give the same sample on any machine.
"""

from array import array
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rebuild.prompts.rows_to_prompts import Prompt, count_chars, count_user_turns

HOW = (
    "from each source in proportion to its prompts (largest remainder, at least one where there is room for all), "
    "and within a source at even distances along its prompts in order of user turns and characters"
)

Counts = partial(array, "I")


@dataclass
class Strata:
    """What the sample goes by: the source, user turns and characters of every prompt, 12 bytes in all."""

    names: dict[str, int] = field(default_factory=dict)
    sources: "array[int]" = field(default_factory=Counts)
    turns: "array[int]" = field(default_factory=Counts)
    chars: "array[int]" = field(default_factory=Counts)

    def add(self, prompt: Prompt) -> None:
        """Add the next prompt."""
        self.sources.append(self.names.setdefault(prompt["source"], len(self.names)))
        self.turns.append(count_user_turns(prompt))
        self.chars.append(count_chars(prompt))


@dataclass(frozen=True)
class Portion:
    """What one source gives to the canary: the numbers of its chosen prompts, and how many it has in all."""

    chosen: list[int]
    of: int


def choose_canary(strata: Strata, size: int) -> dict[str, Portion]:
    """Return the portions of a canary of `size` prompts by source; the sources that give none are left out.

    `size` must be less than the number of prompts.
    """
    if not size:
        return {}
    sources, turns, chars = (
        np.frombuffer(numbers, np.uintc) for numbers in (strata.sources, strata.turns, strata.chars)
    )
    order = np.lexsort((chars, turns, sources))
    counts = np.bincount(sources)
    ends = np.cumsum(counts)
    given = share_out(
        {name: int(counts[strata.names[name]]) for name in sorted(strata.names)}, size
    )
    portions = {}
    for place, (name, count) in enumerate(given.items()):
        number = strata.names[name]
        rows = order[ends[number] - counts[number] : ends[number]]
        positions = spread(len(rows), count, place, len(given))
        portions[name] = Portion(rows[positions].tolist(), len(rows))
    return portions


def share_out(rows: dict[str, int], size: int) -> dict[str, int]:
    """Return how many of `size` prompts each source gives, those that give none left out.

    In proportion to its rows by largest remainder; of equals the first one is served. Where there are no more sources
    than prompts to give, each gives one at least, at the cost of those that are furthest above their proportion.
    """
    total, least = sum(rows.values()), int(len(rows) <= size)
    given = {name: max(least, size * count // total) for name, count in rows.items()}

    def owed(name: str) -> int:
        return size * rows[name] - total * given[name]

    missing = size - sum(given.values())
    for name in sorted(rows, key=owed, reverse=True)[: max(0, missing)]:
        given[name] += 1
    for _ in range(-missing):
        given[min((name for name in rows if given[name] > 1), key=owed)] -= 1
    return {name: count for name, count in given.items() if count}


def spread(length: int, count: int, place: int, places: int) -> list[int]:
    """Return `count` different positions below `length`, at even distances.

    The first one lies (place + 1/2) / places of a distance from the start, so that sources that give one prompt each
    give short and long ones between them.
    """
    steps = range(2 * place + 1, 2 * places * count, 2 * places)
    return [step * length // (2 * places * count) for step in steps]
