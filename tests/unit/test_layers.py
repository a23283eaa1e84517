"""Which layers are captured: the formula, a given list, and what is refused."""

import pytest

from rebuild.errors import StepError
from rebuild.states.layers import check_layers, choose_layers, dflash_layers, eagle3_layers


@pytest.mark.parametrize(
    ("num_hidden_layers", "taps", "layers"),
    [
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 5, [1, 9, 17, 25, 33]),
        (30, 5, [1, 8, 14, 20, 27]),
        (8, 5, [1, 2, 3, 4, 5]),
        (30, 1, [15]),
    ],
)
def test_the_formula_gives_the_layers_of_published_drafters(num_hidden_layers, taps, layers):
    assert dflash_layers(num_hidden_layers, taps) == layers


def test_auto_takes_the_formula_and_a_list_is_taken_as_it_is():
    assert choose_layers("auto", 64) == [1, 16, 31, 46, 61]
    assert choose_layers([0, 2, 29], 30) == [0, 2, 29]


def test_auto_for_eagle3_takes_what_sglang_captures_by_default():
    assert eagle3_layers(36) == [1, 17, 32]
    assert choose_layers("auto", 30, eagle3=True) == [1, 14, 26]
    assert choose_layers([0, 2, 29], 30, eagle3=True) == [0, 2, 29]


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ([], "the list is empty"),
        ([1, 30], "the model has no layer 30"),
        ([-1, 2], "the model has no layer -1"),
        ([3, 1], "layer 1 comes after layer 3"),
        ([1, 3, 3], "layer 3 is named twice"),
        ([1, 2.0], "2.0 is not a whole number"),
        ([True, 2], "True is not a whole number"),
    ],
)
def test_layers_that_do_not_fit_the_model_stop_and_say_why(layers, fault):
    with pytest.raises(StepError) as stopped:
        check_layers(layers, 30)
    assert fault in stopped.value.what
    assert stopped.value.where == "hidden_states.layers"
    assert "between 0 and 29" in stopped.value.expected
    assert stopped.value.seen == str(layers)


def test_a_model_too_shallow_for_the_formula_stops_instead_of_capturing_a_layer_twice():
    with pytest.raises(StepError, match="named twice"):
        choose_layers("auto", 6)


def test_a_word_other_than_auto_stops():
    with pytest.raises(StepError) as stopped:
        choose_layers("all", 30)
    assert stopped.value.seen == "'all'"


def test_before_the_model_is_known_only_the_order_is_checked():
    check_layers([1, 10**9], None)
    with pytest.raises(StepError, match="layer 1 comes after layer 3") as stopped:
        check_layers([3, 1], None)
    assert stopped.value.expected.startswith("ascending ids from 0, each once")
