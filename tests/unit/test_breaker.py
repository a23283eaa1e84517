"""When a job stops itself: failures in a row or by half, and what it says of them."""

import pytest

from rebuild.errors import StepError
from rebuild.generate.breaker import Breaker


def stopped_by(outcomes: list[str | None]) -> tuple[int, str]:
    """Return how many outcomes the breaker took, and what it said when it stopped the job (or nothing)."""
    breaker = Breaker()
    for taken, outcome in enumerate(outcomes, start=1):
        try:
            breaker.record(outcome)
        except StepError as error:
            return taken, str(error)
    return len(outcomes), ""


def test_twenty_failures_in_a_row_stop_the_job_at_once():
    assert stopped_by([None] * 30 + ["no_ids: none"] * 30)[0] == 50


def test_nineteen_in_a_row_again_and_again_do_not_while_most_are_answered():
    assert stopped_by(([None] * 30 + ["no_ids: none"] * 19) * 20) == (980, "")


@pytest.mark.parametrize(("failures", "stops"), [(49, False), (50, True)])
def test_half_of_the_last_hundred_stop_the_job(failures: int, stops: bool):
    outcomes = [None] * (100 - failures)
    for place in range(failures):
        outcomes.insert(2 * place, "request: HTTP 500")
    taken, said = stopped_by(outcomes)
    assert (taken, bool(said)) == (100, stops)


def test_a_few_requests_are_not_judged_by_their_share():
    assert stopped_by(["text: differs", None] * 40) == (80, "")


def test_failures_long_ago_are_forgotten():
    assert stopped_by(["abort: x", None] * 40 + [None] * 1000 + ["abort: x", None] * 40)[1] == ""


def test_the_commonest_kind_is_named_with_an_example_although_details_differ():
    errors = [f"request: HTTP 500: worker {n}" for n in range(12)] + ["text: differs"] * 8
    _, said = stopped_by([*errors])
    assert "20 of the last 20 requests failed" in said
    assert "most often (12 times) request: HTTP 500: worker 11" in said
    assert "answers so far are kept" in said
