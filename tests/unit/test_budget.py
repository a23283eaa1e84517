"""Room for hidden states: what does not fit stops before it starts, with figures that are right."""

import multiprocessing
import os
import shutil

import pytest

from rebuild.errors import StepError
from rebuild.files import write_json
from rebuild.states import budget
from rebuild.states.budget import Size, check_whole_run, longest_that_fits, reserved

SIZE = Size(per_token=1000, per_sample=500)
MB = 10**6


@pytest.fixture
def free(monkeypatch):
    """Set the free bytes of the disk, what is always kept free included."""

    def set_free(size):
        usage = shutil._ntuple_diskusage(10**15, 0, size + budget.KEPT_FREE)
        monkeypatch.setattr(budget.shutil, "disk_usage", lambda _: usage)

    return set_free


def test_what_fits_is_reserved_and_given_back(tmp_path, free):
    free(3 * MB)
    with reserved(tmp_path, "00000", SIZE, [1000, 1000], None) as needed:
        assert needed == 2 * MB + 1000
        assert (tmp_path / ".reserved-00000").exists()
    assert not (tmp_path / ".reserved-00000").exists()


def test_what_does_not_fit_the_disk_is_refused_with_the_choices(tmp_path, free):
    free(1 * MB)
    with (
        pytest.raises(StepError, match="do not fit the disk") as caught,
        reserved(tmp_path, "00000", SIZE, [1000, 1000], None),
    ):
        pass
    error = caught.value
    assert error.expected == "at most 1 MB" and error.seen.startswith(
        "2 MB: 2000 tokens in 2 samples"
    )
    assert "about 49 % of them fit" in error.remedy
    assert "hidden_states.max_length: 499" in error.remedy
    assert "hidden_states.samples" in error.remedy and "snakemake exported" in error.remedy
    assert "speculators_fp8" not in error.remedy  # half of it would not fit either


def test_choices_that_would_not_help_are_left_out(tmp_path, free):
    free(0)
    with (
        pytest.raises(StepError) as caught,
        reserved(tmp_path, "00000", SIZE, [1000], None),
    ):
        pass
    assert caught.value.remedy.startswith("one of these: make room; keep no states at all")
    assert "268 MB of it are kept free" in caught.value.what
    free(1_200_000)
    with (
        pytest.raises(StepError, match="do not fit the disk") as caught,
        reserved(tmp_path, "00000", SIZE, [2000], None),
    ):
        pass
    assert "speculators_fp8" in caught.value.remedy


def test_what_other_jobs_have_reserved_and_not_written_is_not_free(tmp_path, free):
    free(3 * MB)
    with reserved(tmp_path, "00000", SIZE, [2000], None):
        with (
            pytest.raises(StepError, match="do not fit"),
            reserved(tmp_path, "00001", SIZE, [2000], None),
        ):
            pass
        (tmp_path / "00000").mkdir()
        (tmp_path / "00000" / "a.ckpt").write_bytes(bytes(1_500_000))
        with reserved(tmp_path, "00001", SIZE, [2000], None):
            pass


def reserve_and_die(folder):
    with reserved(folder, "00000", SIZE, [2000], None):
        os._exit(0)


def test_a_dead_jobs_reservation_counts_for_nothing(tmp_path, free):
    process = multiprocessing.get_context("fork").Process(target=reserve_and_die, args=(tmp_path,))
    free(3 * MB)
    process.start()
    process.join()
    assert process.exitcode == 0 and (tmp_path / ".reserved-00000").exists()
    with reserved(tmp_path, "00001", SIZE, [2000], None):
        assert not (tmp_path / ".reserved-00000").exists()


def test_the_limit_counts_what_is_there_already(tmp_path, free):
    free(100 * MB)
    (tmp_path / "00003" / "speculators").mkdir(parents=True)
    (tmp_path / "00003" / "speculators" / "x").write_bytes(bytes(3 * MB))
    with reserved(tmp_path, "00000", SIZE, [1900], 0.005):
        pass
    with (
        pytest.raises(StepError, match=r"hidden_states.max_disk_gb = 0.005") as caught,
        reserved(tmp_path, "00000", SIZE, [2100], 0.005),
    ):
        pass
    assert caught.value.expected == "at most 2 MB"


def test_the_canary_stops_a_run_that_would_pass_the_limit(tmp_path, free, capsys):
    free(10**12)
    manifest = tmp_path / "manifest.json"
    shards = {"canary": {"user_turns": 2}, "00000": {"user_turns": 98}}
    write_json(manifest, {"shards": shards})
    check_whole_run(tmp_path, SIZE, [1000, 1000], manifest, None, 0.2)
    assert "will take 100 MB" in capsys.readouterr().err
    with pytest.raises(StepError, match=r"max_disk_gb = 0.05") as caught:
        check_whole_run(tmp_path, SIZE, [1000, 1000], manifest, None, 0.05)
    assert caught.value.seen.startswith("100 MB: 100000 tokens in 100 samples")
    check_whole_run(tmp_path, SIZE, [1000, 1000], manifest, 50, 0.051)
    capsys.readouterr()
    check_whole_run(tmp_path, SIZE, [1000, 1000], manifest, 1, None)
    assert "will take 2 MB" in capsys.readouterr().err  # the canary is captured whole


def test_the_longest_length_that_fits_is_exact():
    lengths = [10, 20, 30]
    for room in range(0, 70_000, 500):
        length = longest_that_fits(room, SIZE, lengths)
        cut = [min(length, one) for one in lengths]
        longer = [min(length + 1, one) for one in lengths]
        assert length == 0 or SIZE.of(cut) <= room
        assert length == 30 or SIZE.of(longer) > room
