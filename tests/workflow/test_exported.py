"""The target `exported` under real Snakemake, with dummy jobs: what it makes, and what makes it anew."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rebuild.files import sha256_file, write_json
from tests.support.dummies import dummy_tree, planned, run_tree, started
from tests.support.shards import clean_answers, write_shard
from tests.support.trees import ROOT

EXPORTING = {"export_shard": 2}


@pytest.fixture(scope="module")
def exported_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = dummy_tree(tmp_path_factory.mktemp("exported") / "tree")
    done = run_tree(tree, "audited")
    assert done.returncode == 0, done.stdout
    (tree / "calls").unlink()
    done = run_tree(tree, "exported")
    assert done.returncode == 0, done.stdout
    return tree


def of_shards(jobs: dict[str, int]) -> dict[str, int]:
    """Return the jobs that a shard has of its own."""
    return {rule: count for rule, count in jobs.items() if rule.endswith("_shard")}


def test_after_the_audit_only_the_export_is_left_to_do(exported_tree: Path):
    assert started(exported_tree) == EXPORTING
    names = sorted(path.name for path in (exported_tree / "results/demo/export").iterdir())
    assert names == ["00000.jsonl", "00001.jsonl"]
    assert planned(exported_tree, "exported") == {}


def test_a_shard_waits_for_the_whole_run_only_where_that_is_the_gate(exported_tree: Path):
    one_shard = ["results/demo/export/00000.jsonl", "--forceall", "--config"]
    for gate, waits in [("shard", False), ("run", True)]:
        jobs = planned(exported_tree, *one_shard, f"audit={{gate: {gate}}}")
        assert ("approve_run" in jobs) is waits


def test_the_default_target_exports_nothing(exported_tree: Path):
    assert "export_shard" not in planned(exported_tree, "--forceall")


def test_tokens_that_an_earlier_start_made_anew_are_audited_and_exported_anew(exported_tree: Path):
    tokenized = exported_tree / "results/demo/tokenized/00001.parquet"
    tokenized.write_text("made anew")
    (exported_tree / "calls").unlink()
    done = run_tree(exported_tree, "exported")
    assert done.returncode == 0, done.stdout
    assert of_shards(started(exported_tree)) == {
        "audit_shard": 1,
        "approve_shard": 1,
        "export_shard": 1,
    }


def test_tokens_that_are_made_anew_on_the_way_are_exported_anew(exported_tree: Path):
    for phase in ("tokenized", "audit"):
        for file in (exported_tree / "results/demo" / phase).glob("00000.*"):
            file.unlink()
    anew = ["tokenize_shard", "audit_shard", "approve_shard", "export_shard"]
    assert of_shards(planned(exported_tree, "exported")) == dict.fromkeys(anew, 1)


def test_a_new_date_of_the_same_approval_exports_nothing_again(exported_tree: Path):
    assert run_tree(exported_tree, "exported").returncode == 0
    os.utime(exported_tree / "results/demo/audit/00001.approved")
    assert planned(exported_tree, "exported") == {}


def test_the_rule_runs_the_real_script_on_a_real_shard(exported_tree: Path):
    real = Path("workflow", "scripts", "export_shard.py")
    shutil.copy(ROOT / real, exported_tree / real)
    shard = write_shard(exported_tree / "results" / "demo", clean_answers(5))
    write_json(shard.approved, {"tokenized_sha256": sha256_file(shard.tokenized)})
    target = "results/demo/export/00000.jsonl"
    done = run_tree(exported_tree, target, "--force", "--allowed-rules", "export_shard")
    assert done.returncode == 0, done.stdout
    lines = (exported_tree / target).read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"p{n}_gen0" for n in range(5)]
    log = exported_tree / "results/demo/logs/export_shard/00000.log"
    assert f"{target}: 5 samples" in log.read_text()
