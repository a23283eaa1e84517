"""What makes states unfit: not finite, zero rows, zero layers."""

import pytest
import torch

from rebuild.errors import StepError
from rebuild.states.judgement import check_states, measure_states

LAYERS = [1, 8, 14]


def good_states(length=6, width=4):
    return torch.full((length, 3 * width), 2.0, dtype=torch.bfloat16)


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
