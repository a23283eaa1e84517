"""What a plain forward of a sample says: every layer's states at some of its tokens, and the likelihood of all of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rebuild.states.policy import Floats


@dataclass(frozen=True)
class Reference:
    """A sample of S tokens through the whole model of N layers, kept at P of its positions, bfloat16 on the CPU.

    `layers` is [N, P, H], the output of every 0-based layer; `post_norm` [P, H], the last one's after the final norm;
    `logprobs` holds per temperature, float32 [S - 1], at position t the log-probability of token t + 1.
    """

    positions: list[int]
    layers: Tensor
    post_norm: Tensor
    logprobs: Mapping[float, Floats]
