"""The recipe: what determines a run's data, and that nothing is mixed or redone by accident."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from rebuild.prompts.sources import source_identity
from rebuild.start.config import complete_config, load_schema
from rebuild.start.recipe import (
    FOLDERS,
    SEMANTICS,
    SETTINGS,
    UPSTREAM,
    changed_settings,
    check_recipe,
    downstream,
    existing_results,
    fingerprints,
    make_recipe,
    record_recipe,
)
from rebuild.tables import GENERATED, TableWriter

SCHEMA = load_schema(Path("workflow/schemas/config.schema.yaml"))
CONFIG = complete_config({"server": {"flags": {"context-length": 4096}}}, SCHEMA)
PHASES = list(SETTINGS)


def config_with(path: str, value: Any) -> dict[str, Any]:
    """Return the configuration with another value at a dotted key (server.flags takes whole mappings)."""
    config = copy.deepcopy(CONFIG)
    section, _, key = path.partition(".")
    config[section][key] = value
    return config


def changed(config: dict[str, Any]) -> set[str]:
    """Return the phases whose fingerprint differs from that of CONFIG."""
    before, after = fingerprints(make_recipe(CONFIG)), fingerprints(make_recipe(config))
    return {phase for phase in PHASES if before[phase] != after[phase]}


# Fingerprints


def test_a_fingerprint_is_the_same_in_every_process_and_order_of_keys():
    turned = {key: CONFIG[key] for key in reversed(CONFIG)}
    turned["sampling"] = {key: CONFIG["sampling"][key] for key in reversed(CONFIG["sampling"])}
    code = (
        "import json, sys; from rebuild.start.recipe import *; "
        "print(json.dumps(fingerprints(make_recipe(json.loads(sys.argv[1])))))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(turned)],
            env=os.environ | {"PYTHONPATH": "workflow/scripts", "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        assert json.loads(done.stdout) == fingerprints(make_recipe(CONFIG))


FIRST_CHANGED = [
    ("prompts.shards", 8, "prompts"),
    ("prompts.assign", "contiguous", "prompts"),
    ("prompts.limit", 10, "prompts"),
    ("plan.canary", 9, "prompts"),
    ("model.source", "/models/other", "model"),
    ("model.revision", "abc", "model"),
    ("sampling.temperature", 0.7, "generate"),
    ("sampling.max_tokens", 8, "generate"),
    ("sampling.chat_template_kwargs", {"enable_thinking": True}, "generate"),
    ("server.flags", {"context-length": 8192}, "generate"),
    ("server.flags", {"context-length": 4096, "dtype": "float16"}, "generate"),
    ("server.flags", {}, "generate"),
    ("server.external", ["http://127.0.0.1:30000"], "generate"),
    ("generate.history_reasoning", "preserve", "generate"),
    ("generate.min_answer_tokens", 1, "generate"),
    ("generate.truncated", "drop", "tokenize"),
    ("tokenize.max_length", 8, "tokenize"),
    ("tokenize.min_loss_tokens", 8, "tokenize"),
    ("tokenize.allow_template", True, "tokenize"),
    ("hidden_states.backend", "sglang", "hidden_states"),
    ("hidden_states.layers", [1, 2], "hidden_states"),
    ("hidden_states.include_last", "post_norm", "hidden_states"),
    ("hidden_states.formats", ["modelopt"], "hidden_states"),
    ("hidden_states.dtype", "float32", "hidden_states"),
    ("hidden_states.max_length", 8, "hidden_states"),
    ("hidden_states.samples", 8, "hidden_states"),
    ("hidden_states.batch_tokens", 8, "hidden_states"),
]
AFTER = {
    "prompts": {"prompts", "generate", "tokenize", "hidden_states"},
    "model": {"model", "generate", "tokenize", "hidden_states"},
    "generate": {"generate", "tokenize", "hidden_states"},
    "tokenize": {"tokenize", "hidden_states"},
    "hidden_states": {"hidden_states"},
}


@pytest.mark.parametrize(("path", "value", "phase"), FIRST_CHANGED)
def test_a_setting_changes_its_phase_and_all_that_is_made_from_it(
    path: str, value: Any, phase: str
):
    assert changed(config_with(path, value)) == AFTER[phase]


def test_every_setting_of_the_recipe_is_tried_above():
    tried = {path for path, _, _ in FIRST_CHANGED}
    sections = {path.partition(".")[0] for path in tried}
    for path in (path for paths in SETTINGS.values() for path in paths):
        assert path in tried or (path == "sampling" and "sampling" in sections)


def test_what_a_failed_job_leaves_hidden_is_no_result(tmp_path: Path):
    shard = tmp_path / "hidden_states" / "canary"
    shard.mkdir(parents=True)
    for name in (".parts.jsonl", ".checks.json", "../.reserving"):
        (shard / name).touch()
    assert existing_results(tmp_path, "hidden_states") == []
    (shard / "a_gen0.ckpt").touch()
    assert existing_results(tmp_path, "hidden_states") == [tmp_path / "hidden_states"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("prompts.path", "elsewhere.jsonl"),
        ("prompts.max_rejected", 1),
        ("model.stage_to", "/dev/shm"),
        ("server.tensor_parallel", 4),
        ("server.ready_s", 1),
        ("server.flags", {"context-length": 4096, "mem-fraction-static": 0.5}),
        ("server.flags", {"context-length": 4096, "max-running-requests": 8, "log-level": "info"}),
        ("generate.concurrency", 3),
        ("generate.max_attempts", 1),
        ("audit.accept", {"00001": "seen by hand"}),
        ("generate.logprobs", "all"),
        ("hidden_states.formats", ["specforge"]),
        ("hidden_states.enabled", False),
        ("hidden_states.drafter", "drafter/config.json"),
        ("hidden_states.max_disk_gb", 5),
        ("hidden_states.cross_check", False),
        ("hidden_states.limits", {"rms_factor": 9}),
    ],
)
def test_how_to_run_changes_no_fingerprint(path: str, value: Any):
    assert changed(config_with(path, value)) == set()


def test_the_order_of_formats_changes_nothing():
    one, other = (config_with("hidden_states.formats", names) for names in (["a", "b"], ["b", "a"]))
    assert fingerprints(make_recipe(one)) == fingerprints(make_recipe(other))


def test_a_whole_number_is_the_same_with_and_without_a_decimal_point():
    assert changed(config_with("sampling.top_p", 1.0)) == changed(config_with("sampling.top_p", 1))
    same = config_with("server.flags", {"context-length": 4096.0})
    assert changed(same) == set()


def test_answers_without_ids_change_what_servers_of_others_generate_and_not_what_ours_do():
    external = config_with("server.external", ["http://127.0.0.1:30000"])
    both = copy.deepcopy(external)
    both["tokenize"]["allow_template"] = True
    told = changed_settings(make_recipe(external), make_recipe(both))
    assert told["generate"] == ["tokenize.allow_template: unset -> True"]
    assert told["tokenize"] == ["tokenize.allow_template: False -> True"]


def test_semantics_raised_by_hand_change_the_phase(monkeypatch: pytest.MonkeyPatch):
    before = make_recipe(CONFIG)
    monkeypatch.setitem(SEMANTICS, "tokenize", 2)
    after = make_recipe(CONFIG)
    assert before["phases"]["generate"] == after["phases"]["generate"]
    assert before["phases"]["tokenize"]["fingerprint"] != after["phases"]["tokenize"]["fingerprint"]
    assert changed_settings(before, after)["tokenize"] == ["tokenize semantics: 1 -> 2"]


def test_phases_name_only_what_comes_before_them():
    assert set(UPSTREAM) == set(SEMANTICS) == set(FOLDERS) == set(PHASES)
    for number, phase in enumerate(PHASES):
        assert set(UPSTREAM[phase]) <= set(PHASES[:number])
        assert downstream({phase}) == AFTER[phase]


# The check


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "one"}\n')
    (folder / "b.jsonl").write_text('{"prompt": "two"}\n')
    return folder


@pytest.fixture
def results(tmp_path: Path, prompts: Path) -> Path:
    """A finished run."""
    folder = tmp_path / "results" / "demo"
    record_recipe(folder, make_recipe(CONFIG))
    for name in (name for names in FOLDERS.values() for name in names):
        (folder / name).mkdir()
        (folder / name / "00000").write_text("data")
    write_json(folder / "prompts" / "manifest.json", {"sources": source_identity(prompts)})
    return folder


def refused(results: Path, config: dict[str, Any], prompts: Path) -> StepError:
    with pytest.raises(StepError) as error:
        check_recipe(results, make_recipe(config), prompts)
    return error.value


def removal(results: Path, *names: str) -> str:
    return "rm -r " + " ".join(str(results / name) for name in names)


def test_the_same_recipe_passes(results: Path, prompts: Path):
    check_recipe(results, make_recipe(CONFIG), prompts)


def test_a_run_that_has_not_begun_passes(tmp_path: Path, prompts: Path):
    check_recipe(tmp_path / "results" / "other", make_recipe(CONFIG), prompts)


def test_a_change_is_told_with_old_and_new_value_and_all_ways_out(results: Path, prompts: Path):
    config = config_with("sampling.temperature", 0.7)
    config["hidden_states"]["layers"] = [1, 2]
    error = refused(results, config, prompts)
    assert error.seen == "sampling.temperature: 0.2 -> 0.7; hidden_states.layers: 'auto' -> [1, 2]"
    assert error.where == str(results / "recipe.json")
    assert "set the keys back" in error.remedy
    assert "run:" in error.remedy
    assert error.remedy.endswith(
        removal(results, "generated", "tokenized", "audit", "export", "hidden_states")
    )


def test_a_change_of_hidden_states_alone_gives_up_hidden_states_alone(results: Path, prompts: Path):
    error = refused(results, config_with("hidden_states.dtype", "float32"), prompts)
    assert error.remedy.endswith(f": {removal(results, 'hidden_states')}")


def test_only_what_is_there_is_named(results: Path, prompts: Path):
    subprocess.run(
        ["rm", "-r", *(results / name for name in ("hidden_states", "audit", "export"))], check=True
    )
    (results / "hidden_states").mkdir()  # as Snakemake leaves it
    error = refused(results, config_with("tokenize.max_length", 8), prompts)
    assert error.remedy.endswith(f": {removal(results, 'tokenized')}")


@pytest.mark.parametrize(("path", "value", "phase"), FIRST_CHANGED)
def test_after_the_named_removal_the_check_passes_and_the_recipe_is_recorded(
    results: Path, prompts: Path, path: str, value: Any, phase: str
):
    recipe = make_recipe(config_with(path, value))
    error = refused(results, config_with(path, value), prompts)
    subprocess.run(error.remedy.rpartition(": ")[2], shell=True, check=True)
    check_recipe(results, recipe, prompts)
    record_recipe(results, recipe)
    assert read_json(results / "recipe.json") == recipe
    kept = {name for name in FOLDERS if name not in AFTER[phase]}
    assert all((results / name).exists() for kind in kept for name in FOLDERS[kind])


def test_flags_that_come_and_go_are_named_alone(results: Path, prompts: Path):
    config = config_with("server.flags", {"dtype": "float16", "mem-fraction-static": 0.5})
    seen = refused(results, config, prompts).seen
    assert seen == "server.flags.dtype: unset -> 'float16'; server.flags.context-length: 4096 -> unset"  # fmt: skip


def test_a_null_that_was_not_there_is_a_change(results: Path, prompts: Path):
    old = read_json(results / "recipe.json")
    del old["phases"]["hidden_states"]["settings"]["hidden_states.max_length"]
    old["phases"]["hidden_states"]["fingerprint"] = "of an older version"
    write_json(results / "recipe.json", old)
    assert refused(results, CONFIG, prompts).seen == "hidden_states.max_length: unset -> None"


def test_a_fingerprint_that_counts_otherwise_is_a_change(results: Path, prompts: Path):
    old = read_json(results / "recipe.json")
    old["phases"]["tokenize"]["fingerprint"] = "of an older version"
    old["phases"]["hidden_states"]["fingerprint"] = "made from that"
    write_json(results / "recipe.json", old)
    error = refused(results, CONFIG, prompts)
    assert error.seen == "what determines tokenize"
    assert error.remedy.endswith(removal(results, "tokenized", "audit", "export", "hidden_states"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"phases": {"prompts": {}}}', '{"phases": 1}'])
def test_a_recipe_that_cannot_be_read_stops(results: Path, prompts: Path, text: str):
    (results / "recipe.json").write_text(text)
    error = refused(results, CONFIG, prompts)
    assert str(results / "recipe.json") in error.what


# Prompts


def test_touched_prompts_are_no_change(results: Path, prompts: Path):
    for file in prompts.iterdir():
        os.utime(file, (1, 1))
    check_recipe(results, make_recipe(CONFIG), prompts)


def test_prompts_elsewhere_with_the_same_content_are_no_change(results: Path, prompts: Path):
    moved = prompts.rename(prompts.with_name("moved"))
    check_recipe(results, make_recipe(CONFIG), moved)


def test_prompts_that_are_gone_prove_nothing(results: Path, prompts: Path):
    check_recipe(results, make_recipe(CONFIG), prompts / "gone.jsonl")


def change_content(prompts: Path) -> None:
    (prompts / "b.jsonl").write_text('{"prompt": "owt"}\n')


def add_file(prompts: Path) -> None:
    (prompts / "c.jsonl").write_text('{"prompt": "three"}\n')


def remove_file(prompts: Path) -> None:
    (prompts / "b.jsonl").unlink()


def swap_files(prompts: Path) -> None:
    (prompts / "a.jsonl").rename(prompts / "c.jsonl")


@pytest.mark.parametrize("change", [change_content, add_file, remove_file, swap_files])
def test_other_prompts_are_a_change_of_everything_but_the_model(
    results: Path, prompts: Path, change: Any
):
    change(prompts)
    error = refused(results, CONFIG, prompts)
    assert error.seen == f"content of prompts.path ({prompts})"
    assert error.remedy.endswith(
        removal(results, "prompts", "generated", "tokenized", "audit", "export", "hidden_states")
    )


def test_prompts_are_read_again_only_where_size_or_date_changed(
    results: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
):
    read: list[str] = []
    import rebuild.prompts.sources as sources

    whole = sources.sha256_file
    monkeypatch.setattr(sources, "sha256_file", lambda file: (read.append(file.name), whole(file))[1])  # fmt: skip
    check_recipe(results, make_recipe(CONFIG), prompts)
    assert read == []
    (prompts / "b.jsonl").touch()
    check_recipe(results, make_recipe(CONFIG), prompts)
    assert read == ["b.jsonl"]


# Whatever changes

VALUES = {
    path: st.sampled_from([value for other, value, _ in FIRST_CHANGED if other == path])
    for path, _, _ in FIRST_CHANGED
}


@settings(deadline=None, derandomize=True)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_phase_is_redone_only_after_a_change_was_told(changes: dict[str, Any]):
    config = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        section, _, key = path.partition(".")
        config[section][key] = value
    told = changed_settings(make_recipe(CONFIG), make_recipe(config))
    assert changed(config) == downstream({phase for phase, lines in told.items() if lines})


def test_results_whose_recipe_is_lost_are_held_against_their_own_fingerprints(
    results: Path, prompts: Path
):
    (results / "recipe.json").unlink()
    shard = results / "generated" / "00000.parquet"
    made_now = fingerprints(make_recipe(CONFIG))["generate"]
    for fingerprint in (made_now, "of other settings"):
        with TableWriter(shard, GENERATED, {"fingerprint": fingerprint}):
            pass
        if fingerprint == made_now:
            check_recipe(results, make_recipe(CONFIG), prompts)
        else:
            with pytest.raises(StepError, match=r"its recipe\.json is gone"):
                check_recipe(results, make_recipe(CONFIG), prompts)
