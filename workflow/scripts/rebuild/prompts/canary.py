"""Which prompts go ahead of all others: a sample with the sources, turns and lengths of the whole.

Nothing in it is random: the same prompts in the same order give the same sample on any machine.
"""

from array import array
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rebuild.prompts.rows_to_prompts import Prompt, count_chars, count_user_turns
from rebuild.strata import share_out, spread

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
