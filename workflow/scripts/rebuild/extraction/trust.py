"""What a job proves before it captures anything: that it reads the right layers of the model that answered.

A few samples are recomputed by a plain forward of transformers, and everything else is held against that: the capture
itself, the other backend's, and the log-probabilities that the server returned. Any miss stops the job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rebuild.extraction.checked import Checked
from rebuild.states.captured import CaptureAll, Captured, Wanted
from rebuild.states.comparison import check_layers_agree, check_states_agree
from rebuild.states.policy import check_likely, check_on_policy
from rebuild.states.ranges import Seen
from rebuild.states.reference import Reference
from rebuild.states.samples import Sample
from rebuild.step import say

PLAIN = "a plain forward by transformers"
ENGINE = "SGLang's own capture"
NEUTRAL = {"presence_penalty": 0, "repetition_penalty": 1}


@dataclass
class Findings:
    """What was found at a job's start: per check the worst error seen, and the samples' log-probabilities."""

    errors: dict[str, list[float]] = field(default_factory=dict)
    logprob_gaps: list[float] = field(default_factory=list)
    logprobs: dict[str, float] = field(default_factory=dict)

    def add(self, check: str, errors: Sequence[float]) -> None:
        """Keep the largest error of every layer."""
        before = self.errors.get(check, [0.0] * len(errors))
        self.errors[check] = [max(pair) for pair in zip(before, errors, strict=True)]

    def facts(self) -> dict[str, Any]:
        """Return the findings as the index keeps them."""
        return {"errors": self.errors, "logprob_gaps": self.logprob_gaps}


def check_capture(
    findings: Findings,
    check: str,
    taken: Sequence[Captured],
    checked: Sequence[Checked],
    references: Sequence[Reference],
    wanted: Wanted,
    limit: float,
    names: tuple[str, str],
) -> None:
    """Hold captured states against the references of the same samples, layer by layer.

    `names` says what is held against what.

    Raises:
        StepError: names the sample, the layer, and the layer or token that matches better.
    """
    what, against = names
    for captured, case, reference in zip(taken, checked, references, strict=True):
        at = reference.positions
        where = f"{case.where}, {what}"
        errors = check_layers_agree(
            captured.taps[at],
            reference.layers,
            wanted.layers,
            limit=limit,
            where=where,
            against=against,
        )
        for name, state, expected in (
            ("the final state before the norm", captured.pre_norm, reference.layers[-1]),
            ("the final state after the norm", captured.post_norm, reference.post_norm),
        ):
            if state is not None:
                check_states_agree(
                    state[at], expected, limit=limit, where=where, what=name, against=against
                )
        findings.add(check, errors)
    worst = max((max(errors) for errors in [findings.errors.get(check, [0.0])]), default=0.0)
    say(f"{what} against {against}: {len(taken)} samples, largest error of a layer {worst:.2g}")


def check_answers(
    findings: Findings,
    checked: Sequence[Checked],
    references: Sequence[Reference],
    sampling: Mapping[str, Any],
    limits: Mapping[str, float],
    seen: Seen | None,
) -> None:
    """Hold the answers' likelihood for the captured model against what the server said of them, or the canary's range.

    Raises:
        StepError: the captured model is not the one that answered.
    """
    comparable = all(sampling[name] == value for name, value in NEUTRAL.items())
    if not comparable:
        say("log-probabilities are not compared: the sampling penalties are part of the server's")
    for case, reference in zip(checked, references, strict=True):
        mean = mean_logprob(reference, case.sample)
        findings.logprobs[case.sample.sample_id] = mean
        if case.sampled is not None and comparable:
            gap = check_on_policy(
                reference.logprobs, case.sampled, limit=limits["logprob_gap"], where=case.where
            )
            findings.logprob_gaps.append(gap)
            say(f"{case.where}: log-probabilities {gap:.3g} nats from the server's")
        elif seen is not None and seen.logprobs:
            check_likely(mean, seen.logprobs, drop=limits["logprob_drop"], where=case.where)
            say(f"{case.where}: mean log-probability {mean:.3f}, likely as the canary's")
        else:
            say(f"{case.where}: mean log-probability {mean:.3f}; nothing to hold it against")


def mean_logprob(reference: Reference, sample: Sample) -> float:
    """Return the mean log-probability of the sample's supervised tokens."""
    supervised = sample.loss_mask[1:].astype(bool)
    return float(np.asarray(reference.logprobs[1.0])[supervised].mean())


def capture_checked(capture_all: CaptureAll, checked: Sequence[Checked]) -> list[Captured]:
    """Return the checked samples' states, in their order."""
    taken = dict(capture_all([case.sample.input_ids.tolist() for case in checked]))
    return [taken[number] for number in range(len(checked))]
