"""How a job keeps a server under its shard: watchdog, concurrency, and when another start would be in vain."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from rebuild.errors import StepError
from rebuild.generate.client import ServerLost
from rebuild.serving import serving
from rebuild.serving.serving import (
    Loss,
    ServingOptions,
    answer_shard,
    cannot_start,
    choose_concurrency,
    explain_loss,
    first_cause,
    given_up,
    is_hopeless,
    watch,
)

STALL_S = 0.8
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def eagerness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WATCH_S", 0.02)


def options(**changes: Any) -> ServingOptions:
    given = {
        "ready_s": 1,
        "stall_s": STALL_S,
        "max_restarts": 3,
        "min_running_requests": 1,
        "concurrency": "auto",
        "golden": [],
    }
    return ServingOptions(**(given | changes))


# The watchdog


def shard_with(**in_flight: float) -> Any:
    return SimpleNamespace(
        log=SimpleNamespace(sync_if_due=lambda: None),
        in_flight=in_flight,
        tokens=0,
        progress=SimpleNamespace(update=lambda count, note: None),
        note=lambda: "",
    )


def server_with(
    tokens: Callable[[], int], alive: Callable[[], bool] = lambda: True, counts: bool = True
) -> Any:
    return SimpleNamespace(
        tokens_generated=tokens, alive=alive, counts_tokens=counts, released=threading.Event()
    )


def watched(shard: Any, server: Any, for_s: float = 1.5 * STALL_S) -> str:
    """Watch for a while and return why the server was lost, or nothing if it was not."""

    async def run() -> str:
        try:
            async with asyncio.timeout(for_s):
                await watch(shard, server, STALL_S)
        except TimeoutError:
            return ""
        except ServerLost as lost:
            return str(lost)
        finally:
            server.released.set()
        raise AssertionError

    return asyncio.run(run())


def clock() -> int:
    return time.monotonic_ns()


def test_a_server_that_makes_tokens_is_left_alone():
    assert watched(shard_with(p0_gen0=0.0), server_with(clock)) == ""


def test_a_server_that_stands_still_while_requests_are_in_flight_is_lost():
    lost = watched(shard_with(p0_gen0=0.0, p1_gen0=0.0), server_with(lambda: 7), PATIENCE_S)
    assert lost.startswith("no token in") and lost.endswith("with 2 requests in flight")


def test_a_server_that_does_not_even_count_is_lost_as_soon_as_one_that_stands_still():
    server = server_with(lambda: int(server.released.wait(PATIENCE_S)))
    began = time.monotonic()
    assert watched(shard_with(p0_gen0=0.0), server, PATIENCE_S).startswith("no token in")
    assert time.monotonic() - began < PATIENCE_S / 2


def test_answers_that_come_in_prove_a_server_whose_count_cannot_be_read():
    shard = shard_with(p0_gen0=0.0)

    def fail() -> int:
        shard.tokens += 1
        raise requests.HTTPError("404")

    assert watched(shard, server_with(fail)) == ""


def test_a_server_without_work_may_stand_still():
    assert watched(shard_with(), server_with(lambda: 7)) == ""


def test_the_time_without_work_does_not_count():
    shard = shard_with()

    def give_work() -> int:
        shard.in_flight["p0_gen0"] = 0.0
        return 7

    began = time.monotonic()
    assert watched(shard, server_with(give_work), PATIENCE_S).startswith("no token in")
    assert time.monotonic() - began > STALL_S


def test_a_dead_server_is_lost_at_once():
    server = server_with(clock, alive=lambda: False)
    assert watched(shard_with(), server) == "it does not answer any more"


def test_servers_of_others_are_not_judged_by_their_tokens():
    assert watched(shard_with(p0_gen0=0.0), server_with(lambda: 0, counts=False)) == ""


# Signals


def test_a_signal_that_reaches_another_thread_stops_a_job_whose_server_still_loads():
    loading = threading.Event()
    server: Any = contextlib.nullcontext(
        SimpleNamespace(wait_ready=lambda timeout_s: loading.wait(timeout_s))
    )
    shard: Any = SimpleNamespace(
        prepare=lambda loop: None,
        log=SimpleNamespace(rows=0),
        unfinished=1,
        stopping=loading,
        begin_round=lambda: None,
        first_request=None,
    )

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(number)

    def send() -> None:
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, stop)
    sender = threading.Thread(target=send)
    began = time.monotonic()
    try:
        sender.start()
        with pytest.raises(SystemExit):
            asyncio.run(answer_shard(shard, lambda: server, options(ready_s=PATIENCE_S)))
    finally:
        signal.signal(signal.SIGUSR1, before)
        sender.join()
    assert time.monotonic() - began < PATIENCE_S / 2


# How many conversations at once


def running(count: int) -> Any:
    return SimpleNamespace(effective_running_requests=lambda: count, log="server-1.log")


@pytest.mark.parametrize(
    ("effective", "expected"), [(1, 2), (10, 11), (32, 36), (100, 110), (128, 141)]
)
def test_auto_keeps_a_tenth_more_in_flight_than_the_server_runs(effective: int, expected: int):
    assert choose_concurrency(running(effective), options()) == expected


def test_fewer_than_the_floor_stop_the_job_and_name_what_would_help():
    with pytest.raises(StepError, match="runs only 15 requests at once") as stopped:
        choose_concurrency(running(15), options(min_running_requests=64, concurrency=8))
    said = str(stopped.value)
    assert "server.min_running_requests = 64" in said
    assert "disable-radix-cache: true" in said and "mem-fraction-static" in said


def test_a_number_without_a_floor_asks_the_server_nothing():
    assert choose_concurrency(SimpleNamespace(), options(concurrency=7)) == 7  # type: ignore[arg-type]


def test_a_server_that_dies_before_it_tells_is_lost():
    def fail() -> int:
        raise requests.ConnectionError("refused")

    with pytest.raises(ServerLost, match="refused"):
        choose_concurrency(SimpleNamespace(effective_running_requests=fail), options())  # type: ignore[arg-type]


# When another start would be in vain


def loss(what: str, ready: bool = False, hopeless: bool = False) -> Loss:
    return Loss(StepError(what, seen="tail", remedy="mend it"), ready, hopeless)


@pytest.mark.parametrize(
    ("losses", "in_vain"),
    [
        ([loss("status 1")], False),
        ([loss("status 2", hopeless=True)], True),
        ([loss("status 1"), loss("status 1")], True),
        ([loss("port taken"), loss("status 1")], False),
        ([loss("port taken"), loss("status 1"), loss("status 1")], True),
        ([loss("no token", ready=True), loss("no token", ready=True)], False),
        ([loss("no token", ready=True), loss("status 1"), loss("status 1")], False),
    ],
)
def test_a_start_that_failed_once_is_tried_again_but_not_one_that_fails_alike_or_for_good(
    losses: list[Loss], in_vain: bool
):
    assert is_hopeless(losses) == in_vain


@pytest.mark.parametrize(("status", "in_vain"), [(2, True), (1, False), (-9, False), (None, False)])
def test_a_refused_command_line_is_not_put_to_another_server(status: int | None, in_vain: bool):
    assert cannot_start(SimpleNamespace(exit_status=lambda: status)) == in_vain  # type: ignore[arg-type]


def test_the_last_error_says_how_many_failed_the_last_ones_reason_and_that_answers_are_kept():
    error = given_up([loss("no token in 300 s", ready=True), loss("killed")])
    assert error.what == "2 servers failed one after another; the last: killed"
    assert error.seen == "tail"
    assert error.remedy == "mend it; finished answers are kept, a new start goes on after them"
    assert given_up([loss("killed")]).what == "killed"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "no token in 300 s"),
        (-signal.SIGKILL, "it ended at work, killed by SIGKILL"),
        (1, "it ended at work, with status 1"),
    ],
)
def test_a_servers_own_end_explains_more_than_what_a_request_saw_of_it(
    status: int | None, said: str
):
    server: Any = SimpleNamespace(exit_status=lambda: status)
    assert explain_loss(server, ServerLost("no token in 300 s")).startswith(said)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([ServerLost("gone"), StepError("20 of the last 20 requests failed")], 1),
        ([OSError("disk"), ServerLost("gone")], 1),
        ([OSError("disk"), ValueError("odd")], 0),
    ],
)
def test_of_several_failures_the_one_that_decides_what_is_done_is_raised(
    failures: list[Exception], first: int
):
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", failures[:1]), *failures[1:]])
    assert first_cause(nested) is failures[first]
