"""Which samples of a shard are captured when not all are: from every source and length in proportion, without chance."""

from collections.abc import Mapping, Sequence
from typing import Any

from rebuild.shards import CANARY
from rebuild.states.samples import Sample
from rebuild.strata import share_out, spread


def shard_quota(samples: int, shard: str, shards: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return how many samples a shard gives of about `samples` of the whole run, or None for all of them.

    `shards` is that of prompts/manifest.json, in the order of the shards; user turns stand for samples, which are not
    known before everything is answered. The canary gives all, and counts.
    """
    if shard == CANARY:
        return None
    of_canary: int = shards[CANARY]["user_turns"] if CANARY in shards else 0
    rest = max(0, samples - of_canary)
    turns: dict[str, int] = {
        name: facts["user_turns"] for name, facts in shards.items() if name != CANARY
    }
    before = 0
    for name, own in turns.items():
        if name == shard:
            break
        before += own
    total = max(1, sum(turns.values()))
    return rest * (before + turns[shard]) // total - rest * before // total


def choose_samples(samples: Sequence[Sample], count: int | None) -> list[Sample]:
    """Return `count` of the samples, in their order: each source in proportion, and of each at even distances by length."""
    if count is None or count >= len(samples):
        return list(samples)
    if not count:
        return []
    by_source: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        by_source.setdefault(sample.source, []).append(number)
    given = share_out({name: len(by_source[name]) for name in sorted(by_source)}, count)
    chosen: set[int] = set()
    for place, (name, size) in enumerate(given.items()):
        ordered = sorted(by_source[name], key=lambda number: len(samples[number]))
        chosen |= {ordered[at] for at in spread(len(ordered), size, place, len(given))}
    return [samples[number] for number in sorted(chosen)]
