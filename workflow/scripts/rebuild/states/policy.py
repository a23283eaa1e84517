"""Whether the model that is being captured is the one that answered.

The server gave the log-probability of every token that it sampled. The same tokens through the captured model must be
about as likely: a wrong model, revision, quantization, template, or ids shifted by one make them far less so. Without
the server's numbers there is still the canary's range: what a model sampled itself it finds likely.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rebuild.errors import StepError

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sampled:
    """What the server said of one answer: where it begins among the sample's tokens, and its log-probabilities."""

    begins: int
    logprobs: Floats


def answer_logprobs(next_logprobs: Floats, begins: int, count: int) -> Floats:
    """Return the log-probabilities of `count` tokens from position `begins` on.

    `next_logprobs` [S - 1] holds at position t that of token t + 1; fewer are returned where the sample was cut.
    """
    return next_logprobs[begins - 1 : begins - 1 + count]


def logprob_gap(by_temperature: Mapping[float, Floats], sampled: Sampled) -> tuple[float, float]:
    """Return the mean absolute difference to the server's log-probabilities, and the temperature it was found at.

    Servers return them either as the model has them or after division by the temperature: the nearer one counts.
    """
    gaps = {}
    for temperature, logprobs in by_temperature.items():
        ours = answer_logprobs(logprobs, sampled.begins, len(sampled.logprobs))
        gaps[temperature] = float(np.abs(ours - sampled.logprobs[: len(ours)]).mean())
    nearest = min(gaps, key=gaps.__getitem__)
    return gaps[nearest], nearest


def check_on_policy(
    by_temperature: Mapping[float, Floats], sampled: Sampled, *, limit: float, where: str
) -> float:
    """Return the gap in nats per token between the captured model and the server that sampled the answer.

    Raises:
        StepError: it is more than `limit`.
    """
    gap, _ = logprob_gap(by_temperature, sampled)
    if gap <= limit:
        return gap
    ours = answer_logprobs(by_temperature[1.0], sampled.begins, len(sampled.logprobs))
    raise StepError(
        "the captured model is not the one that answered",
        where=where,
        expected=f"log-probabilities of the answer's tokens as the server returned them, within {limit:g} nats on "
        "average (hidden_states.limits.logprob_gap)",
        seen=f"{gap:.3f} nats apart; on average {float(ours.mean()):.3f} here, "
        f"{float(sampled.logprobs[: len(ours)].mean()):.3f} from the server",
        remedy=REMEDY,
    )


def check_likely(mean_logprob: float, canary: Sequence[float], *, drop: float, where: str) -> None:
    """Stop if an answer is far less likely to the captured model than any of the canary's.

    Raises:
        StepError: its mean log-probability is more than `drop` nats below the canary's lowest.
    """
    if mean_logprob >= min(canary) - drop:
        return
    raise StepError(
        "the captured model does not find its own answer likely",
        where=where,
        expected=f"a mean log-probability of the supervised tokens of {min(canary) - drop:.3f} or more: the lowest of "
        f"{len(canary)} answers of the canary ({min(canary):.3f}) less hidden_states.limits.logprob_drop ({drop:g})",
        seen=f"{mean_logprob:.3f}",
        remedy=REMEDY,
    )


REMEDY = (
    "look for a model, revision, quantization or chat template that differs between serving and capture "
    "(results/<run>/model/manifest.json, server.flags), or ids that are shifted; for a quantized server raise the limit "
    "to what its quantization is known to cost"
)
