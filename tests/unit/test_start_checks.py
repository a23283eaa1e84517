"""What stops a start: settings that would fail only after hours of work."""

import copy
from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.start.checks import check_start
from rebuild.start.config import complete_config, load_schema

SCHEMA = load_schema(Path("workflow/schemas/config.schema.yaml"))
SHARDS = ["00000", "00001"]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.touch()
    return copy.deepcopy(complete_config({"prompts": {"path": str(prompts)}}, SCHEMA))


def refused(config: dict[str, Any], folder: Path, gpus: int = 4) -> StepError:
    with pytest.raises(StepError) as error:
        check_start(config, SHARDS, gpus, folder)
    return error.value


def test_a_sound_configuration_starts(config: dict[str, Any], tmp_path: Path):
    config["audit"]["accept"] = {"00001": "seen by hand"}
    config["server"]["tensor_parallel"] = 4
    check_start(config, SHARDS, 4, tmp_path)


def test_prompts_that_are_nowhere_are_named(config: dict[str, Any], tmp_path: Path):
    config["prompts"]["path"] = "nowhere.jsonl"
    assert "nowhere.jsonl" in refused(config, tmp_path).what


def test_prompts_that_were_cut_before_may_be_gone(config: dict[str, Any], tmp_path: Path):
    config["prompts"]["path"] = "nowhere.jsonl"
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "manifest.json").touch()
    check_start(config, SHARDS, 4, tmp_path)


def test_a_waiver_for_no_shard_of_the_run_is_refused(config: dict[str, Any], tmp_path: Path):
    config["audit"]["accept"] = {"00001": "fine", "00077": "a slip"}
    error = refused(config, tmp_path)
    assert "'00077'" in error.seen and "'00001'" in error.expected


def test_the_canary_and_the_run_as_a_whole_can_be_waived(config: dict[str, Any], tmp_path: Path):
    config["audit"]["accept"] = {"canary": "seen by hand", "run": "seen by hand"}
    check_start(config, ["canary", *SHARDS], 4, tmp_path)
    assert refused(config, tmp_path).seen == "'canary'"  # a run without one


def test_a_waiver_that_is_refused_says_what_the_shards_are_called(
    config: dict[str, Any], tmp_path: Path
):
    config["audit"]["accept"] = {"00077": "a slip"}
    with pytest.raises(StepError) as error:
        check_start(config, ["canary", *SHARDS], 4, tmp_path)
    assert error.value.expected.startswith("'canary', shards from '00000' to '00001'")


@pytest.mark.parametrize(("limit", "starts"), [(None, True), (10, True), (9, False)])
def test_a_limit_that_leaves_a_shard_without_prompts_is_refused(
    config: dict[str, Any], tmp_path: Path, limit: int | None, starts: bool
):
    config["plan"]["canary"] = 8
    config["prompts"] |= {"shards": 2, "limit": limit}
    if starts:
        check_start(config, ["canary", *SHARDS], 4, tmp_path)
    else:
        assert "at least 10: 8 for plan.canary" in refused(config, tmp_path).expected


def test_more_devices_per_server_than_there_are_is_refused(config: dict[str, Any], tmp_path: Path):
    config["server"]["tensor_parallel"] = 4
    assert refused(config, tmp_path, gpus=2).seen == "4"
    check_start(config, SHARDS, 0, tmp_path)  # no limit was set
    config["server"]["external"] = ["http://127.0.0.1:1"]
    check_start(config, SHARDS, 2, tmp_path)
