"""What a start redoes, refuses and leaves alone: the real Snakefile and rules under real Snakemake, with dummy jobs."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.dummies import (
    calls,
    dummy_tree,
    live_driver,
    planned,
    run_tree,
    started,
    wait_for_job,
    wait_until,
)
from tests.support.trees import write_config

ALL = {
    "shard_prompts": 1,
    "stage_model": 1,
    "generate_shard": 2,
    "tokenize_shard": 2,
    "audit_shard": 2,
    "approve_shard": 2,
    "extract_hidden_states": 2,
}
OF_ONE_SHARD = {rule: 1 for rule, jobs in ALL.items() if jobs == 2}
JUDGING = {"audit_shard": 2, "approve_shard": 2}


@pytest.fixture(scope="module")
def finished_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = dummy_tree(tmp_path_factory.mktemp("finished") / "tree")
    done = run_tree(tree)
    assert done.returncode == 0, done.stdout
    assert started(tree) == ALL
    return tree


@pytest.fixture
def finished(finished_tree: Path, tmp_path: Path) -> Path:
    """A finished run, moved to another place with its files' dates."""
    copy = shutil.copytree(finished_tree, tmp_path / "moved")
    (copy / "calls").unlink()
    return copy


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    return dummy_tree(tmp_path / "fresh")


def scramble_dates(results: Path) -> None:
    """Give all files dates in the opposite order of the phases."""
    order = ["hidden_states", "audit", "tokenized", "generated", "prompts", "model", "recipe.json"]
    for day, name in enumerate(order):
        path = results / name
        for file in [path] if path.is_file() else path.rglob("*"):
            os.utime(file, (1e9 + day * 86400, 1e9 + day * 86400))


def remove_shard(results: Path, shard: str, *phases: str) -> None:
    for phase in phases:
        for file in (results / phase).glob(f"{shard}*"):
            file.unlink()


# What is redone


def test_settings_of_how_to_run_and_where_redo_nothing(finished: Path):
    config = write_config(
        finished,
        devices=["cpu:0", "cpu:1", "cpu:2"],
        generate={"concurrency": 3, "max_attempts": 9},
        server={"flags": {"mem-fraction-static": 0.5}, "tensor_parallel": 2, "ready_s": 5},
    )
    assert planned(finished, "--configfile", str(config)) == {}


@pytest.mark.parametrize("metadata", ["with Snakemake's metadata", "without"])
def test_copied_results_with_dates_in_any_order_cost_nothing(finished: Path, metadata: str):
    scramble_dates(finished / "results" / "demo")
    if metadata == "without":
        shutil.rmtree(finished / ".snakemake")
    cheap = planned(finished)
    assert "generate_shard" not in cheap
    assert "extract_hidden_states" not in cheap


def test_touched_prompts_redo_nothing(finished: Path):
    (finished / "config" / "demo_prompts.jsonl").touch()
    assert planned(finished) == {}


def test_prompts_that_are_gone_are_not_missed(finished: Path):
    (finished / "config" / "demo_prompts.jsonl").unlink()
    assert planned(finished) == {}


def test_other_limits_judge_again_but_extract_nothing(finished: Path):
    assert planned(finished, "--config", "audit={limits: {truncated_share: 0.9}}") == JUDGING


def test_a_shard_that_was_removed_is_made_again_with_all_that_follows(finished: Path):
    remove_shard(finished / "results" / "demo", "00001", "generated", "tokenized", "audit")
    assert planned(finished) == OF_ONE_SHARD


def test_what_is_missing_is_seen_behind_a_model_that_is_staged_again(finished: Path):
    remove_shard(finished / "results" / "demo", "00001", "generated", "tokenized", "audit")
    plan = planned(finished, "--config", "model={stage_to: /dev/shm}")
    assert plan == OF_ONE_SHARD | {"stage_model": 1}


def test_what_is_missing_is_seen_behind_prompts_that_are_cut_again(finished: Path):
    remove_shard(finished / "results" / "demo", "00001", "generated")
    plan = planned(finished, "generated", "--config", "prompts={shards: 2, max_rejected: 0.5}")
    assert plan == {"shard_prompts": 1, "generate_shard": 1}


def test_a_newer_version_whose_rules_have_other_inputs_and_parameters_redoes_nothing(
    finished: Path,
):
    for name in ("generate", "hidden_states"):
        rules = finished / "workflow" / "rules" / f"{name}.smk"
        text = rules.read_text()
        text = text.replace("    params:\n", '    params:\n        new=untracked("of {shard}"),\n')
        text = text.replace("    output:\n", '        new=ancient("Snakefile"),\n    output:\n')
        rules.write_text(text)
    assert planned(finished) == {}


# What is refused


def test_other_prompts_of_the_same_size_are_refused(finished: Path):
    prompts = finished / "config" / "demo_prompts.jsonl"
    text = prompts.read_text()
    prompts.write_text(text.replace("e", "a", 1))
    assert len(prompts.read_text()) == len(text)
    done = run_tree(finished, "--dry-run")
    assert done.returncode == 1
    assert "content of prompts.path (config/demo_prompts.jsonl)" in done.stdout
    assert removal(done.stdout) == [
        f"results/demo/{phase}"
        for phase in ["prompts", "generated", "tokenized", "audit", "hidden_states"]
    ]


def removal(output: str) -> list[str]:
    """Return what the message says to remove."""
    command = re.search(r"rm -r (.*)$", output, re.MULTILINE)
    assert command, output
    return shlex.split(command[1])


@pytest.mark.parametrize("metadata", ["with Snakemake's metadata", "without"])
def test_after_the_named_results_are_given_up_the_run_goes_on(finished: Path, metadata: str):
    if metadata == "without":
        shutil.rmtree(finished / ".snakemake")
    other = ["--config", "hidden_states={layers: [1, 2]}"]
    refused = run_tree(finished, *other)
    assert refused.returncode == 1
    assert "seen: hidden_states.layers: 'auto' -> [1, 2]" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert removal(refused.stdout) == ["results/demo/hidden_states"]
    subprocess.run(["rm", "-r", *removal(refused.stdout)], cwd=finished, check=True)
    done = run_tree(finished, *other)
    assert done.returncode == 0, done.stdout
    assert started(finished) == {"extract_hidden_states": 2}
    assert planned(finished, *other) == {}
    recipe = json.loads((finished / "results" / "demo" / "recipe.json").read_text())
    assert recipe["phases"]["hidden_states"]["settings"]["hidden_states.layers"] == [1, 2]


# How many devices


def test_a_server_that_needs_more_devices_than_there_are_is_refused_and_the_command_line_wins(
    fresh: Path,
):
    wide = ["generated", "--config", "server={tensor_parallel: 3}"]
    done = run_tree(fresh, *wide)
    assert done.returncode == 1
    assert "a server needs more devices than there are" in done.stdout
    assert calls(fresh) == []
    done = run_tree(fresh, *wide, "--resources", "gpu=4")
    assert done.returncode == 0, done.stdout
    jobs = [call for call in calls(fresh) if call["rule"] == "generate_shard"]
    assert [job["gpu"] for job in jobs if job["event"] == "start"] == [3, 3]
    assert [job["event"] for job in jobs] == ["start", "end"] * 2  # never two at once: 3 + 3 > 4


# Drivers that die, and drivers that live


def test_after_a_killed_driver_the_run_resumes_without_unlock(fresh: Path):
    (fresh / "hold").write_text("generate_shard")
    with live_driver(fresh) as driver:
        wait_until(lambda: started(fresh).get("generate_shard") == 2)
        jobs = {call["pid"] for call in calls(fresh, "start") if call["rule"] == "generate_shard"}
        driver.kill()
        wait_until(lambda: jobs <= {call["pid"] for call in calls(fresh, "end")})  # they cleaned up
    (fresh / "hold").unlink()
    done = run_tree(fresh, "--rerun-incomplete")
    assert done.returncode == 0, done.stdout
    assert started(fresh) == ALL | {"generate_shard": 4}
    assert planned(fresh) == {}


def test_beside_a_living_driver_others_look_but_do_not_run(fresh: Path):
    (fresh / "hold").write_text("generate_shard")
    with live_driver(fresh) as driver:
        wait_for_job(fresh, "generate_shard")
        recipe = (fresh / "results" / "demo" / "recipe.json").read_bytes()
        assert planned(fresh)["generate_shard"] == 2
        assert_refused(fresh, driver.pid)
        assert run_tree(fresh, "--unlock").returncode == 0
        assert_refused(fresh, driver.pid, "--config", "sampling={temperature: 1}")
        assert (fresh / "results" / "demo" / "recipe.json").read_bytes() == recipe
        (fresh / "hold").unlink()
        assert driver.wait(60) == 0
    assert started(fresh) == ALL


def assert_refused(tree: Path, holder: int, *arguments: str) -> None:
    refused = run_tree(tree, *arguments)
    assert refused.returncode == 1
    assert f"process {holder} on" in refused.stdout
    assert "--unlock is never needed" in refused.stdout
    assert "Traceback" not in refused.stdout


def test_of_two_drivers_that_start_together_one_runs_everything(fresh: Path):
    (fresh / "hold").write_text("generate_shard")
    with live_driver(fresh) as one, live_driver(fresh) as other:
        wait_for_job(fresh, "generate_shard")
        wait_until(lambda: one.poll() is not None or other.poll() is not None)
        (fresh / "hold").unlink()
        assert sorted([one.wait(60), other.wait(60)]) == [0, 1]
    assert started(fresh) == ALL
