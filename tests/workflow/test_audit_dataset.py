"""The target `audit_dataset` under real Snakemake: it succeeds only on a pass, for every format that is known."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rebuild.files import read_json
from tests.support.disaster import FORMATS, build_samples, write_dataset
from tests.support.trees import copy_tree, run_snakemake

ROWS = 60
EVIDENCE = "results/demo/audit_dataset.json"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("audit-dataset") / "tree")


@pytest.fixture(scope="module")
def tokenizer(qwen3_tokenizer: Path) -> object:
    return AutoTokenizer.from_pretrained(qwen3_tokenizer, local_files_only=True)


def audit(tree: Path, dataset: Path, *settings: str) -> tuple[int, str]:
    """Run the target; return its exit status and what it printed."""
    config = [f"dataset={dataset}", *settings]
    done = run_snakemake(tree, "--cores", "1", "audit_dataset", "--config", *config)
    return done.returncode, done.stdout + done.stderr


def failures(tree: Path) -> dict[str, float]:
    """Return the checks that failed and their values."""
    checks = read_json(tree / EVIDENCE)["checks"]
    return {check["name"]: check["value"] for check in checks if check["verdict"] == "fail"}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_disaster_is_named_with_its_share_in_every_format(
    tree: Path, tmp_path: Path, tokenizer: object, kind: str
):
    dataset = write_dataset(tmp_path / "set", kind, build_samples(tokenizer, ROWS))
    status, printed = audit(tree, dataset)
    assert status == 1
    failed = failures(tree)
    share = round(0.87 * ROWS) / ROWS
    assert failed["mask_sum_mode_share"] == pytest.approx(share, abs=0.02)
    assert failed["repeated_answer_share"] == pytest.approx(share, abs=0.02)
    assert "failed its audit" in printed and "exactly 7 supervised tokens" in printed


@pytest.mark.parametrize("kind", ["tokenized", "jsonl"])
def test_a_sound_set_passes_and_the_verdict_is_printed_each_time(
    tree: Path, tmp_path: Path, tokenizer: object, kind: str
):
    dataset = write_dataset(tmp_path / "set", kind, build_samples(tokenizer, ROWS, share=0))
    for _ in range(2):
        status, printed = audit(tree, dataset)
        assert status == 0, printed
        assert f"{dataset}: pass" in printed
    assert failures(tree) == {}
    assert read_json(tree / EVIDENCE)["rows"]["tokenized"] == ROWS


def test_with_the_models_tokenizer_the_answers_themselves_are_judged(
    tree: Path, tmp_path: Path, tokenizer: object, qwen3_tokenizer: Path
):
    with_model = f"dataset_model={qwen3_tokenizer}"
    bad = write_dataset(tmp_path / "bad", "parquet", build_samples(tokenizer, ROWS))
    status, printed = audit(tree, bad, with_model)
    assert status == 1 and r"<think>\n\n</think>\n\nOK." in printed
    assert failures(tree)["empty_answer_share"] == pytest.approx(0.87, abs=0.02)
    good = write_dataset(
        tmp_path / "good", "parquet", build_samples(tokenizer, ROWS, share=0, seed=1)
    )
    assert audit(tree, good, with_model)[0] == 0
    judged = {c["name"] for c in read_json(tree / EVIDENCE)["checks"] if c["verdict"] == "pass"}
    assert {"foreign_id_rows", "empty_answer_share", "stray_marker_share"} <= judged


def test_what_could_not_be_judged_is_said(tree: Path, tmp_path: Path, tokenizer: object):
    dataset = write_dataset(tmp_path / "set", "parquet", build_samples(tokenizer, 20, share=0))
    status, printed = audit(tree, dataset)
    assert status == 0
    line = next(line for line in printed.splitlines() if line.startswith("not judged"))
    assert "empty_answer_share" in line and "unbalanced_rows" in line


@pytest.mark.parametrize("given", ["nothing/there", ""])
def test_a_set_that_is_not_there_is_an_error(tree: Path, given: str):
    config = ["--config", f"dataset={given}"] if given else []
    done = run_snakemake(tree, "--cores", "1", "audit_dataset", *config)
    printed = done.stdout + done.stderr
    assert done.returncode == 1
    assert ("no tokenized dataset found" if given else "no data set is given") in printed
