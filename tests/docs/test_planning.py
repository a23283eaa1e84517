"""A fresh clone plans the whole run, and a mistake in the configuration stops before anything is planned."""

from pathlib import Path

import pytest
import yaml

from tests.support.checkout import clone, run
from tests.support.dummies import planned

PER_RUN = ["stage_model", "shard_prompts"]
PER_SHARD = [
    "generate_shard",
    "tokenize_shard",
    "audit_shard",
    "approve_shard",
    "extract_hidden_states",
]
JUDGED = {"audit_run": 1, "approve_run": 1}
REPORT = {"make_report": 1}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return clone(tmp_path / "clone")


def test_a_dry_run_on_a_fresh_clone_plans_every_job_and_makes_nothing(tree: Path):
    config = yaml.safe_load((tree / "config" / "config.yaml").read_text())
    shards = config["prompts"]["shards"] + 1  # the canary
    assert config["plan"]["canary"] > 0
    per_run = dict.fromkeys(PER_RUN, 1) | JUDGED | REPORT
    assert planned(tree) == per_run | dict.fromkeys(PER_SHARD, shards)
    assert not (tree / "results").exists()
    assert not (tree / "resources").exists()


@pytest.mark.parametrize(
    ("target", "last"),
    [
        ("generated", "generate_shard"),
        ("tokenized", "tokenize_shard"),
        ("audited", "approve_shard"),
        ("extracted", "extract_hidden_states"),
    ],
)
def test_a_target_plans_the_phases_up_to_its_own(cloned: Path, target: str, last: str):
    upto = PER_SHARD[: PER_SHARD.index(last) + 1]
    jobs = planned(cloned, target, "--config", "plan={canary: 0}")
    judged = JUDGED if last in ("approve_shard", "extract_hidden_states") else {}
    assert set(jobs) == {*PER_RUN, *upto, *judged}


def test_the_export_needs_the_audit_and_no_hidden_states(cloned: Path):
    jobs = planned(cloned, "exported", "--config", "plan={canary: 0}")
    assert "export_shard" in jobs and "extract_hidden_states" not in jobs
    assert jobs["export_shard"] == jobs["approve_shard"]


def test_a_target_before_the_audit_has_the_canary_audited_all_the_same(cloned: Path):
    jobs = planned(cloned, "generated")
    shards = jobs.pop("generate_shard")
    canary = {"tokenize_shard": 1, "audit_shard": 1, "approve_shard": 1}
    assert shards > 2
    assert jobs == dict.fromkeys(PER_RUN, 1) | canary


def test_a_run_without_hidden_states_ends_with_the_audit(tree: Path):
    mine = "hidden_states: {enabled: false}\nprompts: {shards: 2}\nplan: {canary: 0}\n"
    (tree / "mine.yaml").write_text(mine)
    jobs = planned(tree, "--configfile", "mine.yaml")
    per_run = dict.fromkeys(PER_RUN, 1) | JUDGED | REPORT
    assert jobs == per_run | dict.fromkeys(PER_SHARD[:-1], 2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("sampling: {temprature: 1}", "unknown key 'sampling.temprature'; did you mean 'sampling.temperature'?"),
        ("temperature: 1", "unknown key 'temperature'; did you mean 'sampling.temperature'?"),
        ("promts: {shards: 1}", "unknown key 'promts'; did you mean 'prompts'?"),
        ("prompts: {shards: none}", "prompts.shards is 'none'; expected integer >= 1"),
    ],
    ids=["misspelt", "at the wrong level", "a misspelt section", "a wrong kind of value"],
)  # fmt: skip
def test_a_wrong_configuration_stops_at_parse_and_names_what_is_right(
    tree: Path, config: str, said: str
):
    (tree / "mine.yaml").write_text(config)
    done = run("snakemake --dry-run --configfile mine.yaml", tree)
    assert done.returncode != 0
    assert said in done.stdout
    assert "Job stats" not in done.stdout
