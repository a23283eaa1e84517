"""What a start redoes, refuses and leaves alone: the real Snakefile and rules under real Snakemake, with dummy jobs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
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

SHARDS = ["00000", "00001"]
ALL = {
    "shard_prompts": 1,
    "stage_model": 1,
    "generate_shard": 2,
    "tokenize_shard": 2,
    "audit_shard": 2,
    "approve_shard": 2,
    "extract_hidden_states": 2,
    "audit_run": 1,
    "approve_run": 1,
    "make_report": 1,
}
PER_SHARD = [rule for rule, jobs in ALL.items() if jobs == 2]
OF_THE_RUN = {"audit_run": 1, "approve_run": 1, "make_report": 1}
OF_ONE_SHARD = dict.fromkeys(PER_SHARD, 1) | OF_THE_RUN
JUDGING = {"audit_shard": 2, "approve_shard": 2} | OF_THE_RUN


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


@pytest.mark.parametrize("lost", ["prompts/00001.parquet", "model/manifest.json"])
def test_an_input_that_is_lost_has_nothing_expensive_made_again(finished: Path, lost: str):
    (finished / "results" / "demo" / lost).unlink()
    assert set(planned(finished)) & set(EXPENSIVE) == set()


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


# The canary


WITH_CANARY = ALL | dict.fromkeys(PER_SHARD, 3)
ALL_JUDGED = JUDGING | {"audit_shard": 3, "approve_shard": 3}
EXPENSIVE = ["generate_shard", "extract_hidden_states"]
UNTIL_APPROVED = ["generate_shard", "tokenize_shard", "audit_shard", "approve_shard"]
REFUSING = """
from rebuild.errors import StepError
from rebuild.step import begin_step

begin_step(snakemake.log[0])
raise StepError(f"shard {snakemake.wildcards.shard} failed its audit")
"""


@pytest.fixture
def guarded(tmp_path: Path) -> Path:
    """A fresh tree with a canary."""
    return dummy_tree(tmp_path / "guarded", canary=3)


@pytest.fixture(scope="module")
def guarded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = dummy_tree(tmp_path_factory.mktemp("guarded") / "tree", canary=3)
    done = run_tree(tree)
    assert done.returncode == 0, done.stdout
    assert started(tree) == WITH_CANARY
    return tree


@pytest.fixture
def guarded_copy(guarded_run: Path, tmp_path: Path) -> Path:
    """A finished run with a canary."""
    copy = shutil.copytree(guarded_run, tmp_path / "moved")
    (copy / "calls").unlink()
    return copy


def of_others(tree: Path) -> list[str]:
    """Return the rules whose jobs for other shards than the canary were started."""
    return [call["rule"] for call in calls(tree, "start") if call["shard"] not in (None, "canary")]


def test_the_canary_goes_all_the_way_to_its_approval_before_another_shard_is_begun(
    guarded_run: Path,
):
    jobs = [call for call in calls(guarded_run) if call["shard"]]
    ahead = [(call["event"], call["rule"]) for call in jobs[:8] if call["shard"] == "canary"]
    assert ahead == [(event, rule) for rule in UNTIL_APPROVED for event in ("start", "end")]


def test_a_dry_run_shows_the_whole_plan_with_the_canary_ahead(guarded: Path):
    done = run_tree(guarded, "--dry-run")
    assert done.returncode == 0, done.stdout
    assert planned(guarded) == WITH_CANARY
    shown = re.findall(r"(?:Generating the answers of|Approving) (?:shard |the )(\w+)", done.stdout)
    assert shown[:2] == ["canary", "canary"]
    assert sorted(shown) == sorted([*SHARDS, "canary"] * 2)
    assert "the canary, which all other shards wait for" in done.stdout


def test_while_the_canary_is_not_approved_no_other_shard_is_begun(guarded: Path):
    (guarded / "hold").write_text("approve_shard")
    with live_driver(guarded) as driver:
        wait_for_job(guarded, "approve_shard")
        time.sleep(1)  # long enough for a job that waits for nothing
        assert of_others(guarded) == []
        (guarded / "hold").unlink()
        assert driver.wait(60) == 0
    assert started(guarded) == WITH_CANARY


@pytest.mark.parametrize("target", ["all", "generated", "results/demo/generated/00001.parquet"])
def test_a_canary_that_is_not_approved_stops_everything_else(guarded: Path, target: str):
    (guarded / "workflow" / "scripts" / "approve_shard.py").write_text(REFUSING)
    done = run_tree(guarded, target)
    assert done.returncode == 1
    assert "shard canary failed its audit" in done.stdout
    assert of_others(guarded) == []
    assert [
        call["shard"] for call in calls(guarded, "start") if call["rule"] == "generate_shard"
    ] == ["canary"]
    again = run_tree(guarded, target)
    assert again.returncode == 1
    assert of_others(guarded) == []
    assert started(guarded)["generate_shard"] == 1


def test_an_approval_of_the_canary_that_is_touched_or_made_anew_redoes_nothing(guarded_copy: Path):
    audit = guarded_copy / "results" / "demo" / "audit"
    (audit / "canary.approved").touch()
    assert planned(guarded_copy) == {}
    limits = ["--config", "audit={limits: {truncated_share: 0.9}}"]
    assert planned(guarded_copy, *limits) == ALL_JUDGED
    done = run_tree(guarded_copy, *limits)
    assert done.returncode == 0, done.stdout
    assert started(guarded_copy) == ALL_JUDGED
    assert planned(guarded_copy, *limits) == {}


def test_another_held_out_list_has_all_judged_again_though_it_is_older_than_the_run(
    guarded_copy: Path,
):
    held_out = guarded_copy / "held.txt"
    held_out.write_text("What would a baker of the twelfth century say?\n")
    os.utime(held_out, (0, 0))
    listed = ["--config", "audit={decontaminate: held.txt}"]
    assert planned(guarded_copy, *listed) == ALL_JUDGED
    assert run_tree(guarded_copy, *listed).returncode == 0
    assert planned(guarded_copy, *listed) == {}
    held_out.write_text("What would a mason of the twelfth century say?\n")
    os.utime(held_out, (0, 0))
    assert planned(guarded_copy, *listed) == ALL_JUDGED
    assert planned(guarded_copy) == ALL_JUDGED


def test_a_missing_approval_of_the_canary_has_no_other_shard_made_again(guarded_copy: Path):
    (guarded_copy / "results" / "demo" / "audit" / "canary.approved").unlink()
    done = run_tree(guarded_copy)
    assert done.returncode == 0, done.stdout
    assert "approve_shard" in started(guarded_copy)
    assert set(of_others(guarded_copy)) & {*EXPENSIVE, "tokenize_shard"} == set()
    assert planned(guarded_copy) == {}


def test_a_canary_that_is_made_again_leaves_finished_shards_alone(guarded_copy: Path):
    results = guarded_copy / "results" / "demo"
    remove_shard(results, "canary", "generated", "tokenized", "audit", "hidden_states")
    remove_shard(results, "00001", "generated", "tokenized", "audit", "hidden_states")
    plan = planned(guarded_copy)
    assert [plan[rule] for rule in EXPENSIVE] == [2, 2]
    done = run_tree(guarded_copy)
    assert done.returncode == 0, done.stdout
    begun = [call for call in calls(guarded_copy, "start") if call["rule"] in EXPENSIVE]
    assert {call["shard"] for call in begun} == {"canary", "00001"}
    generated = [call["shard"] for call in begun if call["rule"] == "generate_shard"]
    assert generated == ["canary", "00001"]
    assert planned(guarded_copy) == {}


def test_another_canary_in_a_run_that_has_begun_is_refused(guarded_copy: Path):
    refused = run_tree(guarded_copy, "--config", "plan={canary: 4}")
    assert refused.returncode == 1
    assert "seen: plan.canary: 3 -> 4" in refused.stdout
    assert calls(guarded_copy) == []


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


# Hidden states

DRAFTER = {"num_target_layers": 30, "dflash_config": {"target_layer_ids": [2, 9, 15]}}


def test_a_drafters_layers_are_the_runs_and_the_same_ones_by_hand_redo_nothing(fresh: Path):
    (fresh / "drafter.json").write_text(json.dumps(DRAFTER))
    done = run_tree(fresh, "--config", "hidden_states={drafter: drafter.json}")
    assert done.returncode == 0, done.stdout
    recipe = json.loads((fresh / "results" / "demo" / "recipe.json").read_text())
    settings = recipe["phases"]["hidden_states"]["settings"]
    assert settings["hidden_states.layers"] == [2, 9, 15]
    assert planned(fresh, "--config", "hidden_states={layers: [2, 9, 15]}") == {}


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ("{drafter: drafter.json, layers: [2, 9]}", "two settings name different layers"),
        ("{drafter: nothing.json}", "the drafter's configuration cannot be read"),
        ("{formats: [speculators, speculators_fp8]}", "exclude each other"),
        ("{formats: [specforge_eagle3], layers: [1, 2]}", "takes exactly 3 layers"),
        ("{include_last: pre_norm}", "have no place for the last layer's output"),
        ("{layers: [3, 3]}", "layers"),
    ],
)
def test_settings_of_hidden_states_that_contradict_each_other_stop_the_parse(
    fresh: Path, states: str, says: str
):
    (fresh / "drafter.json").write_text(json.dumps(DRAFTER))
    refused = run_tree(fresh, "--config", f"hidden_states={states}")
    assert refused.returncode == 1
    assert says in refused.stdout and "Traceback" not in refused.stdout
    assert started(fresh) == {}


def test_with_a_canary_its_hidden_states_come_before_any_other_shards(tmp_path: Path):
    tree = dummy_tree(tmp_path / "tree", canary=2)
    assert run_tree(tree).returncode == 0
    ended = [call for call in calls(tree) if call["rule"] == "extract_hidden_states"]
    assert [call["event"] for call in ended[:2]] == ["start", "end"]
    assert [call["shard"] for call in ended[:2]] == ["canary", "canary"] and len(ended) == 6
    (tree / "results" / "demo" / "hidden_states" / "canary.parquet").unlink()
    assert planned(tree) == {"extract_hidden_states": 1}


def test_the_shards_are_joined_for_speculators_alone(fresh: Path):
    assert "join_speculators" not in planned(fresh)
    formats = "hidden_states={formats: [specforge, speculators_fp8]}"
    assert planned(fresh, "--config", formats)["join_speculators"] == 1


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
