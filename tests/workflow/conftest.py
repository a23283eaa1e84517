"""One real run of the whole workflow, shared by the tests that look at its results."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.trees import ROOT, copy_tree, run_snakemake, write_config

SHARDS = ["00000", "00001"]


@dataclass(frozen=True)
class Run:
    """A finished run: its tree, its results, and what the driver printed."""

    tree: Path
    results: Path
    config: Path
    output: str

    def snakemake(self, *arguments: str) -> tuple[int, str]:
        """Run Snakemake once more on the same configuration; return exit status and output."""
        done = run_snakemake(self.tree, *arguments, "--configfile", str(self.config))
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Run:
    """The real workflow on three of the demo's prompts of each kind, in 2 shards: real server, real model, greedy."""
    tree = copy_tree(tmp_path_factory.mktemp("run") / "tree")
    prompts = tree / "prompts.jsonl"
    write_some_of_each_source(ROOT / "config" / "demo_prompts.jsonl", prompts, 3)
    config = write_config(
        tree,
        run="small",
        prompts={"path": str(prompts), "shards": 2},
        model={"source": str(demo_model)},
        sampling={"temperature": 0, "top_p": 1, "max_tokens": 96},
        audit={"limits": {"truncated_share": 1}},
    )
    done = run_snakemake(
        tree, "--cores", "all", "--resources", "gpu=4", "--configfile", str(config)
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-8000:]
    return Run(tree, tree / "results" / "small", config, output)


def write_some_of_each_source(source: Path, target: Path, count: int) -> None:
    """Copy the first `count` prompts of every source."""
    seen: Counter[str] = Counter()
    with open(target, "w", encoding="utf-8") as chosen:
        for line in source.read_text(encoding="utf-8").splitlines():
            name = json.loads(line)["source"]
            seen[name] += 1
            if seen[name] <= count:
                chosen.write(line + "\n")
