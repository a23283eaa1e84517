"""Which samples are captured when not all are: from every source and length in proportion, without chance."""

from collections.abc import Mapping, Sequence
from typing import Any

from rebuild.shards import CANARY
from rebuild.states.samples import Sample
from rebuild.strata import share_out, spread


def shard_quota(samples: int, shard: str, manifest: Mapping[str, Any]) -> int | None:
    """Return how many samples a shard gives of about `samples` of the whole run, or None for all that it has.

    `manifest` is prompts/manifest.json, whose user turns stand for samples: those are not known before everything is
    answered, and may be more (after tool results) or fewer. The canary gives all, and counts. Where prompts were
    interleaved every shard has the whole mix, so shards give all they have, one after another, and the others nothing: a
    job's start costs as much for a few samples as for many. Contiguous shards give in proportion.
    """
    if shard == CANARY:
        return None
    turns: dict[str, int] = {
        name: facts["user_turns"] for name, facts in manifest["shards"].items()
    }
    rest = max(0, samples - turns.pop(CANARY, 0))
    before = sum(own for name, own in turns.items() if name < shard)
    total = max(1, sum(turns.values()))
    if rest >= total:
        return None
    if manifest["assign"] == "interleave":
        left = rest - before
        return None if left >= turns[shard] else max(0, left)
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
