"""What a run's shards are called, and which of them wait for the canary."""

from pathlib import Path

import pytest

from rebuild.shards import awaits_canary, needed, shard_names


def names(shards: int, canary: int) -> list[str]:
    return shard_names({"prompts": {"shards": shards}, "plan": {"canary": canary}})


def test_shards_have_five_digits():
    assert names(3, canary=0) == ["00000", "00001", "00002"]


def test_the_canary_comes_before_them():
    assert names(2, canary=8) == ["canary", "00000", "00001"]


def test_every_shard_but_the_canary_waits_for_it():
    assert awaits_canary("00000", names(2, canary=8))
    assert not awaits_canary("canary", names(2, canary=8))
    assert not awaits_canary("00000", names(2, canary=0))


@pytest.mark.parametrize(
    ("there", "wanted"),
    [([], True), (["path"], True), (["path", "result"], True), (["result"], False)],
)
def test_an_input_is_not_needed_where_it_is_missing_and_the_result_is_there(
    tmp_path: Path, there: list[str], wanted: bool
):
    for name in there:
        (tmp_path / name).touch()
    path, result = str(tmp_path / "path"), str(tmp_path / "result")
    assert needed(path, result) == (path if wanted else [])
