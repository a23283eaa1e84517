"""The main job, real in every part: what it leaves behind, and that it is true."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rebuild.files import read_json, sha256_file
from rebuild.tables import (
    GENERATED,
    HIDDEN_STATES,
    PROMPTS,
    REJECTED,
    TOKENIZED,
    TableWriter,
    iter_rows,
    read_metadata,
)
from tests.support.shards import make_answer, make_disaster
from tests.support.trees import copy_tree
from tests.workflow.conftest import SHARDS, Run

LAYERS = [1, 8, 14, 20, 27]  # DFlash's formula for 30 layers and five taps


def rows_of(run: Run, phase: str) -> list[dict[str, Any]]:
    return [row for shard in SHARDS for row in iter_rows(run.results / phase / f"{shard}.parquet")]


@pytest.fixture(scope="session")
def plain_model(demo_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


def test_every_file_of_the_design_is_there_with_its_columns(finished_run: Run):
    schemas = {
        "prompts": PROMPTS,
        "generated": GENERATED,
        "tokenized": TOKENIZED,
        "hidden_states": HIDDEN_STATES,
    }
    for phase, schema in schemas.items():
        for shard in SHARDS:
            path = finished_run.results / phase / f"{shard}.parquet"
            assert pq.read_schema(path).remove_metadata() == schema, path
            facts = read_metadata(path)
            assert facts["fingerprint"] and facts["schema_version"] == "1"
            assert int(facts["rows"]) == pq.read_metadata(path).num_rows > 0
    assert pq.read_schema(finished_run.results / "prompts" / "rejected.parquet").names == list(
        REJECTED.names
    )
    for name in ["recipe.json", "model/manifest.json", "prompts/manifest.json"]:
        assert (finished_run.results / name).is_file()
    for shard in SHARDS:
        assert read_json(finished_run.results / "audit" / f"{shard}.json")["verdict"] == "pass"
        assert (finished_run.results / "audit" / f"{shard}.approved").is_file()


def test_nothing_undeclared_is_left_of_work_in_progress(finished_run: Run):
    partial = [path for path in (finished_run.results / ".partial").rglob("*") if path.is_file()]
    assert partial == []
    assert [path for path in finished_run.results.rglob("*.tmp")] == []


def test_the_canary_was_approved_before_any_other_shard_was_generated(finished_run: Run):
    said = ["Approving shard canary", *(f"answers of shard {shard}" for shard in SHARDS[1:])]
    places = [finished_run.output.index(words) for words in said]
    assert places[0] == min(places)
    assert read_json(finished_run.results / "audit" / "canary.approved")["verdict"] == "pass"


def test_every_prompt_is_in_one_shard_and_every_sample_occurs_once(finished_run: Run):
    manifest = read_json(finished_run.results / "prompts" / "manifest.json")
    assert manifest["canary"]["prompts"] == 4
    for phase, name in [("prompts", "prompt_id"), ("tokenized", "sample_id")]:
        names = [row[name] for row in rows_of(finished_run, phase)]
        assert len(set(names)) == len(names) >= manifest["accepted"] > 4


def test_every_prompt_has_its_rows_in_prompt_order(finished_run: Run):
    for shard in SHARDS:
        prompts = iter_rows(finished_run.results / "prompts" / f"{shard}.parquet")
        turns = [
            (prompt["prompt_id"], turn)
            for prompt in prompts
            for turn in range(sum(m["role"] == "user" for m in prompt["messages"]))
        ]
        rows = list(iter_rows(finished_run.results / "generated" / f"{shard}.parquet"))
        assert [(row["prompt_id"], row["turn"]) for row in rows] == turns
        assert [row["sample_id"] for row in rows] == [f"{p}_gen{turn}" for p, turn in turns]


def test_ids_decode_to_the_text_that_was_served(finished_run: Run, tokenizer: Any):
    answered = [row for row in rows_of(finished_run, "generated") if row["response_token_ids"]]
    assert len(answered) >= 20
    for row in answered:
        decoded = tokenizer.decode(row["response_token_ids"], skip_special_tokens=True)
        assert decoded.replace("\ufffd", "").strip() == row["content"].replace("\ufffd", "").strip()
        assert row["completion_tokens"] == len(row["response_token_ids"])
        assert row["prompt_tokens"] == len(row["prompt_token_ids"])


def test_prompt_ids_are_the_templates_own_rendering(finished_run: Run, tokenizer: Any):
    for row in rows_of(finished_run, "generated"):
        if not row["prompt_token_ids"] or row["tools"]:
            continue
        messages = [{k: m[k] for k in ("role", "content")} for m in row["messages"]]
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert list(rendered) == row["prompt_token_ids"], row["sample_id"]


def test_greedy_answers_are_those_of_plain_transformers(finished_run: Run, plain_model: Any):
    first_turns = [
        row
        for row in rows_of(finished_run, "generated")
        if row["turn"] == 0 and row["response_token_ids"]
    ]
    assert len(first_turns) >= 10
    for row in first_turns[:10]:
        prompt = torch.tensor([row["prompt_token_ids"]])
        with torch.inference_mode():
            greedy = plain_model.generate(prompt, max_new_tokens=96, do_sample=False)
        assert greedy[0, prompt.shape[1] :].tolist() == row["response_token_ids"], row["sample_id"]


def test_a_later_turn_continues_the_models_own_answer(finished_run: Run):
    rows = {row["sample_id"]: row for row in rows_of(finished_run, "generated")}
    later = [row for row in rows.values() if row["turn"] > 0 and row["response_token_ids"]]
    assert later
    for row in later:
        before = rows[f"{row['prompt_id']}_gen{row['turn'] - 1}"]
        assert row["messages"][-2]["content"] == before["content"]


def test_training_rows_are_the_engines_own_ids(finished_run: Run):
    generated = {row["sample_id"]: row for row in rows_of(finished_run, "generated")}
    for row in rows_of(finished_run, "tokenized"):
        source = generated[row["sample_id"]]
        prompt, response = source["prompt_token_ids"], source["response_token_ids"]
        assert row["input_ids"] == prompt + response
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(response)
        assert (row["seq_len"], row["loss_tokens"]) == (len(row["input_ids"]), len(response))


def test_the_index_describes_every_file(finished_run: Run):
    tokenized = {row["sample_id"]: row for row in rows_of(finished_run, "tokenized")}
    index = rows_of(finished_run, "hidden_states")
    assert {row["sample_id"] for row in index} == set(tokenized)
    for row in index:
        path = finished_run.results / "hidden_states" / row["file"]
        assert row["layers"] == LAYERS and row["finite"] and row["zero_rows"] == 0
        assert (row["sha256"], row["bytes"]) == (sha256_file(path), path.stat().st_size)
        assert row["seq_len"] == tokenized[row["sample_id"]]["seq_len"]


def test_a_second_run_says_that_there_is_nothing_to_be_done(finished_run: Run):
    for arguments in [["--cores", "all", "--resources", "gpu=4"], ["--rerun-incomplete"]]:
        status, output = finished_run.snakemake(*arguments)
        assert status == 0 and "Nothing to be done" in output


def test_the_log_of_a_job_names_the_servers_own_log(finished_run: Run):
    for shard in SHARDS:
        log = (finished_run.results / "logs" / "generate_shard" / f"{shard}.log").read_text()
        server_log = f"results/small/logs/server/{shard}/server-1.log"
        assert server_log in log and (finished_run.tree / server_log).is_file()


def test_the_disaster_stops_at_the_audit_and_extraction_never_starts(
    finished_run: Run, tmp_path: Path
):
    tree = copy_tree(tmp_path / "tree")
    shutil.copytree(finished_run.results, tree / "results" / "small")
    results = tree / "results" / "small"
    shutil.copy(finished_run.config, tree / "test.yaml")
    spoil_answers(results / "generated" / "00001.parquet")
    for path in [
        "tokenized/00001.parquet",
        "audit/00001.json",
        "audit/00001.approved",
        "hidden_states/00001.parquet",
    ]:
        (results / path).unlink()
    shutil.rmtree(results / "hidden_states" / "00001")
    run = Run(tree, results, tree / "test.yaml", "")
    status, output = run.snakemake()
    assert status == 1
    assert "shard 00001 failed its audit" in output
    verdict = read_json(results / "audit" / "00001.json")
    failed = {check["name"] for check in verdict["checks"] if check["verdict"] == "fail"}
    assert {"empty_share", "mask_sum_mode_share"} & failed, json.dumps(verdict["checks"])[:2000]
    assert not (results / "audit" / "00001.approved").exists()
    assert not (results / "hidden_states" / "00001.parquet").exists()
    assert not (results / "hidden_states" / "00001").exists()
    assert "extract_hidden_states" not in output.split("shard 00001 failed its audit")[1]


def spoil_answers(path: Path) -> None:
    """Replace 87 % of a finished shard's answers by an empty thought and "OK."."""
    facts = read_metadata(path)
    rows = list(iter_rows(path))
    answered = [row for row in rows if row["response_token_ids"]]
    kept = ("sample_id", "prompt_id", "turn", "source", "messages", "tools", "prompt_token_ids")
    for number, row in enumerate(answered):
        made = make_disaster if number < 0.87 * len(answered) else make_answer
        counted = {"prompt_tokens": len(row["prompt_token_ids"])}
        row |= made(row["prompt_id"]) | {key: row[key] for key in kept} | counted
    with TableWriter(path, GENERATED, facts) as writer:
        writer.write(rows)
