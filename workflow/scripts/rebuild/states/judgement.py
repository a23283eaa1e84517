"""The judgement of one sample's hidden states: are they finite and non-zero, and how large, layer by layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rebuild.errors import StepError

FINAL = -1  # stands for the last layer's output beside the wanted layers
# So many values stay in a core's cache, and torch works on them in the calling thread; with more at once, each writing
# thread would wake a crew of its own.
SERIAL_VALUES = 32768


@dataclass(frozen=True)
class LayerFacts:
    """One layer of one sample: its size, and the tokens whose state is unusable.

    `rms` is the root mean square over all tokens, `token_rms` the median over tokens of a token's own.
    """

    layer: int
    rms: float
    token_rms: float
    tokens: int
    infinite_tokens: tuple[int, ...]
    zero_tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """How a message calls it."""
        return "the last layer's output" if self.layer == FINAL else f"layer {self.layer}"


def measure_layer(states: Tensor, layer: int) -> LayerFacts:
    """Return the facts of one layer's states [S, H]; computed in float32."""
    sizes = token_sizes(states)
    infinite = (~sizes.isfinite()).nonzero().flatten().tolist()
    zero = (sizes == 0).nonzero().flatten().tolist()
    return LayerFacts(
        layer,
        sizes.square().mean().sqrt().item(),
        sizes.nan_to_num(nan=torch.inf).median().item(),
        len(states),
        tuple(infinite),
        tuple(zero),
    )


def token_sizes(states: Tensor) -> Tensor:
    """Return each token's root mean square, float32 [S]; NaN and infinities pass on to their token."""
    width = states.shape[-1]
    rows = max(1, SERIAL_VALUES // width)
    # Always the same memory: to be given it anew takes longer than the arithmetic.
    room = torch.empty(rows, width)
    norms = [
        torch.linalg.vector_norm(room[: len(some)].copy_(some), dim=-1)
        for some in torch.split(states, rows)
    ]
    return torch.cat(norms) / math.sqrt(width)


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
                    f"the hidden states of {fact.name} are {fault}",
                    where=where,
                    expected="finite, non-zero states for every token of every layer",
                    seen=f"{len(tokens)} of {fact.tokens} tokens of {fact.name} are {fault}, "
                    f"the first at position {tokens[0]}; RMS: {describe_rms(facts)}",
                    remedy="compare the model's files with its manifest; if they are whole, try "
                    "hidden_states.dtype: float32, and another device",
                )


def describe_rms(facts: Sequence[LayerFacts]) -> str:
    """Return `layer 1: 0.52, layer 8: 1.3, …`."""
    return ", ".join(f"{fact.name}: {fact.rms:.4g}" for fact in facts)
