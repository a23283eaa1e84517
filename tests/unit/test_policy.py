"""Is the captured model the one that answered: its log-probabilities beside the server's, or the canary's range."""

import numpy as np
import pytest

from rebuild.errors import StepError
from rebuild.states.policy import Sampled, check_likely, check_on_policy

BEGINS, COUNT = 4, 6
NEXT = np.linspace(-2.0, -0.1, 12, dtype=np.float32)  # at t, of token t + 1
SERVER = NEXT[BEGINS - 1 : BEGINS - 1 + COUNT]


def gap(sampled, by_temperature=None, limit=0.1):
    return check_on_policy(by_temperature or {1.0: NEXT}, sampled, limit=limit, where="sample a")


def test_the_servers_own_numbers_agree():
    assert gap(Sampled(BEGINS, SERVER)) == 0


def test_small_differences_of_arithmetic_agree():
    assert gap(Sampled(BEGINS, SERVER + np.float32(0.02))) == pytest.approx(0.02, rel=1e-3)


def test_numbers_after_the_temperature_agree_as_well():
    scaled = NEXT * 2 - 0.5
    sampled = Sampled(BEGINS, scaled[BEGINS - 1 : BEGINS - 1 + COUNT])
    assert gap(sampled, {1.0: NEXT, 0.5: scaled}) == 0


def test_a_shift_by_one_token_is_another_model():
    steep = np.array([-9, -1, -8, -2, -7, -1, -9, -2, -8, -1, -7, -2], dtype=np.float32)
    sampled = Sampled(BEGINS, steep[BEGINS : BEGINS + COUNT])
    with pytest.raises(StepError, match="not the one that answered") as caught:
        gap(sampled, {1.0: steep})
    assert "nats apart" in caught.value.seen and caught.value.where == "sample a"


def test_an_answer_that_was_cut_is_compared_as_far_as_it_goes():
    assert gap(Sampled(BEGINS, SERVER), {1.0: NEXT[: BEGINS + 2]}) == 0


def test_without_the_servers_numbers_the_canarys_range_counts():
    check_likely(-1.9, [-0.4, -1.0], drop=1.0, where="sample a")
    with pytest.raises(StepError, match="does not find its own answer likely") as caught:
        check_likely(-2.1, [-0.4, -1.0], drop=1.0, where="sample a")
    assert caught.value.seen == "-2.100"
    with pytest.raises(StepError):
        check_likely(float("nan"), [-0.4], drop=1.0, where="sample a")
