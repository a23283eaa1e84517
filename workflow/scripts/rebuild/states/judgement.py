"""The judgement of one sample's hidden states: are they finite and non-zero, and how large, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rebuild.errors import StepError


@dataclass(frozen=True)
class LayerFacts:
    """One layer of one sample: root mean square, and the tokens whose state is unusable."""

    layer: int
    rms: float
    tokens: int
    infinite_tokens: tuple[int, ...]
    zero_tokens: tuple[int, ...]


def measure_states(states: Tensor, layers: Sequence[int]) -> list[LayerFacts]:
    """Return the facts of states [S, D·H], one entry per layer; computed in float32, one layer at a time."""
    facts = []
    for layer, block in zip(layers, states.chunk(len(layers), dim=-1), strict=True):
        values = block.float()
        infinite = (~values.isfinite()).any(dim=-1).nonzero().flatten().tolist()
        zero = (values == 0).all(dim=-1).nonzero().flatten().tolist()
        rms = values.square().mean().sqrt().item()
        facts.append(LayerFacts(layer, rms, len(values), tuple(infinite), tuple(zero)))
    return facts


def check_states(facts: Sequence[LayerFacts], where: str) -> None:
    """Stop unless every token's state is finite and not all zero in every layer.

    Raises:
        StepError: names the first layer at fault, how many tokens, and the first of them.
    """
    for fact in facts:
        for tokens, fault in (
            (fact.infinite_tokens, "not finite (NaN or infinite)"),
            (fact.zero_tokens, "all zero"),
        ):
            if tokens:
                raise StepError(
                    f"the hidden states of layer {fact.layer} are {fault}",
                    where=where,
                    expected="finite, non-zero states for every token of every layer",
                    seen=f"{len(tokens)} of {fact.tokens} tokens of layer {fact.layer} are {fault}, "
                    f"the first at position {tokens[0]}; RMS of the layers: {describe_rms(facts)}",
                    remedy="compare the model's files with its manifest; if they are whole, try "
                    "hidden_states.dtype: float32, and another device",
                )


def describe_rms(facts: Sequence[LayerFacts]) -> str:
    """Return `layer 1: 0.52, layer 8: 1.3, …`."""
    return ", ".join(f"layer {fact.layer}: {fact.rms:.4g}" for fact in facts)
