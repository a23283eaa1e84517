"""How large the states of each layer were in the canary: what is far outside that range is not the same quantity.

The measure is the median over tokens of a token's root mean square. The mean would be that of a sample's first tokens:
they may be a hundred times larger than the others, so a short sample's mean is far above a long one's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rebuild.errors import StepError
from rebuild.states.judgement import LayerFacts
from rebuild.tables import iter_rows


@dataclass(frozen=True)
class Seen:
    """What the canary's index says: per layer the least and the largest typical size, and its answers' likelihoods."""

    samples: int
    sizes: Mapping[int, tuple[float, float]]
    logprobs: Sequence[float]


def read_canary(index: Path) -> Seen:
    """Return the ranges of the canary, from the index of its hidden states."""
    rows = list(iter_rows(index, ["sample_id", "layers", "token_rms", "logprob"]))
    sizes: dict[int, tuple[float, float]] = {}
    for row in rows:
        for layer, size in zip(row["layers"], row["token_rms"], strict=True):
            least, most = sizes.get(layer, (size, size))
            sizes[layer] = (min(least, size), max(most, size))
    logprobs = {row["sample_id"]: row["logprob"] for row in rows if row["logprob"] is not None}
    return Seen(len({row["sample_id"] for row in rows}), sizes, list(logprobs.values()))


def check_sizes(facts: Sequence[LayerFacts], seen: Seen, *, factor: float, where: str) -> None:
    """Stop if a layer's states are of another size than any in the canary, by more than `factor`.

    Raises:
        StepError: names the layer, its size, and the canary's range.
    """
    for fact in facts:
        if fact.layer not in seen.sizes:
            continue
        least, most = seen.sizes[fact.layer]
        if not least / factor <= fact.token_rms <= most * factor:
            raise StepError(
                f"the hidden states of layer {fact.layer} are of another size than any in the canary",
                where=where,
                expected=f"a typical size (median over tokens of the root mean square) between {least:.4g} and "
                f"{most:.4g}, as in {seen.samples} samples of the canary, within a factor of {factor:g} "
                "(hidden_states.limits.rms_factor)",
                seen=f"{fact.token_rms:.4g} over {fact.tokens} tokens",
                remedy="look at the sample; if it is sound and only unusual, raise hidden_states.limits.rms_factor; if "
                "many samples are so, the device or the model is not the canary's",
            )
