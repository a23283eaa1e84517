"""Servers that return no token ids, from configuration to training rows: the real rules, answers written as text alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from rebuild.tables import iter_rows, read_metadata
from tests.support.dummies import planned, run_tree
from tests.support.trees import copy_tree, write_config

TEXT_ONLY = '''"""Stands in for the servers: says the same to everybody, and gives no ids."""
from pathlib import Path

from rebuild.generate.conversation import begin_conversation
from rebuild.step import begin_step
from rebuild.tables import GENERATED, TableWriter, iter_rows

begin_step(snakemake.log[0])
assert snakemake.params.allow_template
said = {"content": "Blue.", "finish_reason": "stop", "status": "ok", "completion_tokens": 3}
with TableWriter(Path(snakemake.output.generated), GENERATED, {}) as writer:
    for number, prompt in enumerate(iter_rows(Path(snakemake.input.prompts))):
        row = begin_conversation(prompt, keep_reasoning=False).skeleton() | said
        writer.write([row | ({"content": "<|im_end|>"} if number == 1 else {})])
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = copy_tree(tmp_path / "tree")
    (folder / "workflow" / "scripts" / "generate_shard.py").write_text(TEXT_ONLY)
    prompts = [json.dumps({"prompt": f"What is {number} plus one?"}) for number in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    return folder


def settings(model: Path) -> dict[str, Any]:
    return {
        "prompts": {"path": "prompts.jsonl", "shards": 1},
        "model": {"source": str(model)},
        "server": {"external": ["http://127.0.0.1:9"]},
        "tokenize": {"allow_template": True},
        "hidden_states": {"layers": [1, 2]},
    }


def test_text_alone_becomes_rows_of_the_template_and_says_what_was_dropped(
    tree: Path, tiny_llama: Path
):
    write_config(tree, **settings(tiny_llama))
    done = run_tree(tree, "tokenized", "--configfile", "test.yaml")
    assert done.returncode == 0, done.stdout
    tokenized = tree / "results" / "demo" / "tokenized" / "00000.parquet"
    rows = list(iter_rows(tokenized))
    assert [row["mask_origin"] for row in rows] == ["template"] * 3
    assert json.loads(read_metadata(tokenized)["counts"])["dropped"]["unstable_template"] == 1
    log = (tree / "results" / "demo" / "logs" / "tokenize_shard" / "00000.log").read_text()
    assert "4 answers came without ids: 1 dropped" in log and "special_token: <|im_end|>" in log
    assert planned(tree, "tokenized", "--configfile", "test.yaml") == {}
    manifest = tree / "results" / "demo" / "model" / "manifest.json"
    manifest.touch()
    jobs = planned(tree, "tokenized", "--configfile", "test.yaml")
    assert "tokenize_shard" not in jobs and "generate_shard" not in jobs
