"""A progress line that is sane in a log file."""

import pytest

from rebuild import progress
from rebuild.progress import Progress, duration


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(progress, "say", lines.append)
    return lines


def test_a_line_says_done_share_rate_and_time_to_go(clock: Clock, said: list[str]):
    bar = Progress(200, "samples")
    clock.now += 10
    bar.update(50, "2 in flight")
    assert said == ["50/200 samples (25 %), 5.00/s, about 30 s to go; 2 in flight"]


def test_ten_thousand_updates_make_one_line_in_ten_seconds(clock: Clock, said: list[str]):
    bar = Progress(10_000, "prompts", log_every_s=10)
    for _ in range(10_000):
        clock.now += 0.0035
        bar.update()
    assert [line.split()[0] for line in said] == ["2858/10000", "5716/10000", "8574/10000"]


def test_the_last_line_says_how_long_it_took(clock: Clock, said: list[str]):
    bar = Progress(3, "shards")
    clock.now += 100
    bar.update(3)
    bar.finish()
    assert said[-1] == "3/3 shards (100 %), 0.03/s, in 1 min 40 s"


@pytest.mark.parametrize("total", [0, 5])
def test_nothing_done_is_no_division_by_zero(clock: Clock, said: list[str], total: int):
    Progress(total, "samples").finish()
    assert said[0].startswith(f"0/{total} samples")
    assert "to go" not in said[0]


def test_more_than_was_expected_needs_no_more_time(clock: Clock, said: list[str]):
    bar = Progress(10, "samples")
    clock.now += 10
    bar.update(12)
    assert said == ["12/10 samples (120 %), 1.20/s, in 10 s"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (5 * 3600 + 120, "5 h 02 min"),
        (48 * 3600, "2 d 0 h"),
        (100 * 3600, "4 d 4 h"),
    ],
)
def test_durations_read_as_people_write_them(seconds: float, words: str):
    assert duration(seconds) == words
