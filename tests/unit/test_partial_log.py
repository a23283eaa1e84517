"""The log of finished answers: what survives a kill, and what a torn or strange line costs."""

import json
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rebuild.errors import StepError
from rebuild.generate import partial_log
from rebuild.generate.partial_log import PartialLog


def row(prompt: str, turn: int = 0, status: str = "ok") -> dict[str, object]:
    return {"prompt_id": prompt, "turn": turn, "status": status, "content": f"{prompt}{turn} é"}


def test_rows_come_back_by_prompt_and_turn_whatever_their_order(tmp_path: Path):
    with PartialLog(tmp_path / "log") as log:
        for prompt, turn in [("b", 0), ("a", 1), ("a", 0)]:
            log.append(row(prompt, turn))
        assert log.rows_of("a") == [row("a", 0), row("a", 1)]
        assert log.rows_of("nobody") == []
    with PartialLog(tmp_path / "log") as log:
        assert (log.rows, log.rows_of("b")) == (3, [row("b", 0)])


def test_a_row_is_on_disk_the_moment_it_is_appended(tmp_path: Path):
    with PartialLog(tmp_path / "log") as log:
        log.append(row("a"))
        assert json.loads((tmp_path / "log").read_bytes()) == row("a")


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_dropped_and_the_next_row_follows_cleanly(tmp_path: Path, cut: int):
    path = tmp_path / "log"
    with PartialLog(path) as log:
        log.append(row("a"))
        log.append(row("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    with PartialLog(path) as log:
        assert (log.rows, log.dropped) == (1, 1)
        log.append(row("c"))
    with PartialLog(path) as log:
        assert (log.rows_of("a"), log.rows_of("b"), log.rows_of("c")) == (
            [row("a")],
            [],
            [row("c")],
        )
        assert log.dropped == 0


def test_a_line_that_a_disk_has_spoilt_costs_only_itself(tmp_path: Path):
    path = tmp_path / "log"
    with PartialLog(path) as log:
        for name in "abc":
            log.append(row(name))
    lines = path.read_bytes().split(b"\n")
    lines[1] = b"\0" * len(lines[1])
    path.write_bytes(b"\n".join(lines))
    with PartialLog(path) as log:
        assert log.dropped == 1
        assert [bool(log.rows_of(name)) for name in "abc"] == [True, False, True]


def test_errors_of_an_earlier_attempt_get_another_chance_but_count_in_their_own(tmp_path: Path):
    with PartialLog(tmp_path / "log") as log:
        log.append(row("a", status="error"))
        assert log.rows_of("a") == [row("a", status="error")]
    with PartialLog(tmp_path / "log") as log:
        assert (log.rows_of("a"), log.retried) == ([], 1)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Have the kernel write no file beyond `size` bytes: a part of a line at most, then none, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_row_that_the_disk_takes_only_in_part_leaves_no_trace_and_stops_the_job(tmp_path: Path):
    path = tmp_path / "log"
    with PartialLog(path) as log:
        log.append(row("a"))
        size = path.stat().st_size
        for room in (30, 0):
            with (
                files_no_larger_than(size + room),
                pytest.raises(StepError, match="cannot be logged") as stopped,
            ):
                log.append(row("b"))
            assert path.stat().st_size == size
        assert str(path) in str(stopped.value) and "df" in str(stopped.value)
        log.append(row("c"))
    with PartialLog(path) as log:
        assert (log.rows, log.dropped) == (2, 0)
        assert log.rows_of("c") == [row("c")]


def test_a_job_waits_for_the_log_of_one_that_is_still_ending(tmp_path: Path):
    ending = PartialLog(tmp_path / "log")
    with ending:
        ending.append(row("a"))
        opened: list[int] = []

        def open_it() -> None:
            with PartialLog(tmp_path / "log") as log:
                opened.append(log.rows)

        other = threading.Thread(target=open_it)
        other.start()
        ending.append(row("b"))
        assert opened == []
    other.join(10)
    assert opened == [2]


def test_two_jobs_never_write_to_one_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partial_log, "LOCK_WAIT_S", 0.3)
    with (
        PartialLog(tmp_path / "log"),
        pytest.raises(StepError, match="another process is at work") as refused,
        PartialLog(tmp_path / "log"),
    ):
        raise AssertionError
    assert str(tmp_path / "log") in str(refused.value)
