"""What makes states unfit: not finite, zero rows, zero layers."""

import pytest
import torch

from rebuild.errors import StepError
from rebuild.extraction.shard import measure
from rebuild.states import judgement
from rebuild.states.captured import Captured
from rebuild.states.judgement import FINAL, check_states

LAYERS = [1, 8, 14]


def good_states(length=6, width=4):
    return torch.full((length, 3 * width), 2.0, dtype=torch.bfloat16)


def measure_states(states, layers, **final):
    return measure(Captured(states.unflatten(1, (len(layers), -1)), **final), layers)


def judge(states):
    check_states(measure_states(states, LAYERS), "shard 00001, sample a_gen0")


def test_good_states_pass_and_their_size_is_known_by_layer():
    states = good_states()
    states[:, 4:8] = -3.0
    judge(states)
    assert [fact.rms for fact in measure_states(states, LAYERS)] == [2.0, 3.0, 2.0]
    assert [fact.layer for fact in measure_states(states, LAYERS)] == LAYERS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_stops_and_its_layer_and_token_are_named(value):
    states = good_states()
    states[4, 7] = value
    with pytest.raises(StepError) as stopped:
        judge(states)
    assert "layer 8 are not finite" in stopped.value.what
    assert stopped.value.where == "shard 00001, sample a_gen0"
    assert "1 of 6 tokens" in stopped.value.seen
    assert "the first at position 4" in stopped.value.seen


def test_a_layer_of_zeros_stops_and_is_named():
    states = good_states()
    states[:, 8:] = 0
    with pytest.raises(StepError) as stopped:
        judge(states)
    assert "layer 14 are all zero" in stopped.value.what
    assert "6 of 6 tokens of layer 14" in stopped.value.seen
    assert "layer 14: 0" in stopped.value.seen


def test_one_token_of_zeros_in_one_layer_stops():
    states = good_states()
    states[5, :4] = 0
    with pytest.raises(StepError) as stopped:
        judge(states)
    assert "1 of 6 tokens of layer 1 are all zero, the first at position 5" in stopped.value.seen


def test_single_zeros_among_other_values_are_fine():
    states = good_states()
    states[:, ::2] = 0
    judge(states)


def test_large_activations_of_bfloat16_do_not_overflow_the_measure():
    (fact, *_) = measure_states(good_states() * 2.0**50, LAYERS)
    assert fact.rms == 2.0**51


@pytest.mark.parametrize("values", [1, 5 * 48, 7 * 48 + 1, 1 << 20])
def test_a_size_is_that_of_the_whole_state_however_many_tokens_are_measured_at_once(
    values, monkeypatch
):
    monkeypatch.setattr(judgement, "SERIAL_VALUES", values)
    states = torch.randn(33, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    fact = judgement.measure_layer(states, 1)
    squares = states.double().square()
    assert fact.rms == pytest.approx(squares.mean().sqrt().item(), rel=1e-6)
    assert fact.token_rms == pytest.approx(squares.mean(1).sqrt().median().item(), rel=1e-6)


def test_a_token_is_unusable_whatever_its_other_values_are():
    states = good_states()
    states[2, 0], states[2, 5] = float("nan"), float("inf")
    facts = measure_states(states, LAYERS)
    assert [fact.infinite_tokens for fact in facts] == [(2,), (2,), ()]


@pytest.mark.parametrize("name", ["pre_norm", "post_norm"])
def test_a_final_state_is_judged_like_a_layer(name):
    final = torch.ones(6, 4, dtype=torch.bfloat16)
    facts = measure_states(good_states(), LAYERS, **{name: final})
    assert [fact.layer for fact in facts] == [*LAYERS, FINAL]
    final[3] = 0
    with pytest.raises(
        StepError, match="the hidden states of the last layer's output are all zero"
    ):
        check_states(measure_states(good_states(), LAYERS, **{name: final}), "sample")
