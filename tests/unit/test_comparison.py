"""Two captures of one sample: rounding passes; another layer, another token and broken values are named."""

import pytest
import torch

from rebuild.errors import StepError
from rebuild.states.comparison import (
    check_layers_agree,
    check_states_agree,
    compared_tokens,
    relative_error,
)

LAYERS = [1, 3, 6]


@pytest.fixture
def every_layer():
    """States of 8 layers [N, P, H] that change from layer to layer by about a third, as a model's do."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(8, 40, 64, generator=generator)
    return (steps * 0.35).cumsum(0).add(torch.randn(40, 64, generator=generator))


def agree(taps, every_layer, limit=0.01):
    return check_layers_agree(
        taps,
        every_layer,
        LAYERS,
        limit=limit,
        where="shard 00000, sample a_gen0",
        against="a plain forward",
    )


def taps_of(every_layer, layers=LAYERS):
    return every_layer[layers].transpose(0, 1).contiguous()


def test_rounding_to_bfloat16_agrees(every_layer):
    errors = agree(taps_of(every_layer).bfloat16(), every_layer)
    assert all(0 < error < 0.005 for error in errors)


@pytest.mark.parametrize("by", [-1, 1])
def test_a_layer_that_is_off_by_one_is_named_with_the_one_it_is(every_layer, by):
    with pytest.raises(StepError, match="states of layer 3 are not those") as caught:
        agree(taps_of(every_layer, [1, 3 + by, 6]), every_layer)
    assert f"layer {3 + by} matches better, with 0" in caught.value.seen
    assert caught.value.where == "shard 00000, sample a_gen0"


def test_a_wide_limit_does_not_hide_a_layer_that_is_off_by_one(every_layer):
    with pytest.raises(StepError, match="layer 2 matches better"):
        agree(taps_of(every_layer, [1, 2, 6]), every_layer, limit=10)


@pytest.mark.parametrize(("by", "which"), [(1, "previous"), (-1, "next")])
def test_a_shift_by_a_token_is_named(every_layer, by, which):
    with pytest.raises(StepError, match=f"states of the {which} token match better"):
        agree(taps_of(every_layer).roll(by, 0), every_layer)


def test_another_model_matches_nothing(every_layer):
    with pytest.raises(StepError, match="no other layer matches better"):
        agree(torch.randn(40, 3, 64), every_layer)


def test_nan_never_agrees(every_layer):
    taps = taps_of(every_layer)
    taps[:, 0] = torch.nan
    with pytest.raises(StepError, match="states of layer 1"):
        agree(taps, every_layer)


def test_a_final_state_is_held_to_its_limit(every_layer):
    final = every_layer[-1]
    arguments = {"limit": 0.01, "where": "here", "what": "the final state", "against": "it"}
    assert check_states_agree(final.bfloat16(), final, **arguments) < 0.005
    with pytest.raises(StepError, match="the final state is not that of it"):
        check_states_agree(final * 1.1, final, **arguments)


def test_the_relative_error_is_the_tokens_mean():
    expected = torch.ones(5, 4)
    seen = expected.clone()
    seen[0] *= 3
    seen[1:] *= 1.5
    assert relative_error(seen, expected) == pytest.approx((2 + 4 * 0.5) / 5)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000, 100_000])
def test_compared_tokens_lie_within_the_sample_and_reach_both_ends(length):
    at = compared_tokens(length)
    assert at[0] == 0 and at[-1] == length - 1
    assert len(at) == min(length, 64)
    assert all(0 <= position < length for position in at)
