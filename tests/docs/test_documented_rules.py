"""What a reader finds in every rules file and every rule."""

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.support.trees import COMMANDS, ROOT

RULES_FILES = sorted((ROOT / "workflow" / "rules").glob("*.smk"))
PARTS = ["docstring", "message", "log", "benchmark", "conda"]


@pytest.mark.parametrize("file", RULES_FILES, ids=lambda file: file.name)
def test_a_rules_file_opens_with_a_sentence_its_inputs_and_its_outputs(file: Path):
    opening = ast.literal_eval('"""' + file.read_text().split('"""')[1] + '"""')
    lines = opening.splitlines()
    assert file.read_text().startswith('"""')
    assert lines[0].endswith(".")
    assert [
        word for word in ("INPUTS", "OUTPUTS") if not any(ln.startswith(word) for ln in lines)
    ] == []


@pytest.mark.parametrize("part", PARTS)
def test_every_step_has_each_of_its_parts(steps: dict[str, Any], part: str):
    # a benchmark is an output to Snakemake: a rule that is to run whenever it is asked for has none
    asked = {name for name, rule in steps.items() if part != "benchmark" or rule["output"]}
    assert [name for name in asked if not steps[name][part]] == []


def test_every_step_runs_the_script_of_its_own_name(steps: dict[str, Any]):
    assert {name: rule["script"] for name, rule in steps.items()} == {
        name: f"../scripts/{name}.py" for name in steps
    }


def test_every_script_belongs_to_a_step_or_is_a_command_and_is_there(steps: dict[str, Any]):
    scripts = {path.stem for path in (ROOT / "workflow" / "scripts").glob("*.py")}
    assert COMMANDS.isdisjoint(steps)
    assert scripts == set(steps) | COMMANDS


def test_every_log_and_benchmark_is_in_the_runs_own_folder_under_the_steps_name(
    steps: dict[str, Any],
):
    for name, rule in steps.items():
        paths = [(rule["log"][0], "logs"), (rule["benchmark"], "benchmarks")]
        for path, folder in [(path, folder) for path, folder in paths if path]:
            assert (
                path.startswith(("results/{run", "results/demo/")) and f"/{folder}/{name}" in path
            )


def test_every_conda_environment_is_there(steps: dict[str, Any]):
    rules = ROOT / "workflow" / "rules"
    assert [rule["conda"] for rule in steps.values() if not (rules / rule["conda"]).is_file()] == []


def test_every_target_has_a_message(targets: dict[str, Any]):
    assert [name for name, rule in targets.items() if not rule["message"]] == []


def test_the_documented_targets_exist_so_far(targets: dict[str, Any]):
    assert {"all", "generated", "tokenized", "audited", "exported", "extracted"} <= set(targets)


def test_parsing_loads_no_library_that_is_slow_to_import(snakefile: dict[str, Any]):
    slow = {"torch", "transformers", "sglang", "pyarrow", "pandas", "aiohttp", "huggingface_hub"}
    assert slow.intersection(snakefile["modules"]) == set()
