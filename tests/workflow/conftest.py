"""Real servers, and one real run of the whole workflow, shared by the tests that look at them."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rebuild.model.manifest import load_manifest
from rebuild.serving.devices import select_devices
from rebuild.serving.lease import lease_devices
from rebuild.serving.server import start_server
from stage_model import stage_model
from tests.support.trees import ROOT, copy_tree, run_snakemake, write_config

SHARDS = ["canary", "00000", "00001"]
# Conversations whose answers end well within the test's token limit, so that later turns are reached.
BRIEF = {
    "brief-1": ["What is the capital of France? One word.", "And of Italy? One word."],
    "brief-2": ["Say hello.", "Say goodbye.", "Say thank you."],
}


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


@dataclass(frozen=True)
class RunningServer:
    """A real server that answers, and the model that it serves."""

    url: str
    model_name: str
    model_path: Path


def stage_locally(model: Path, folder: Path) -> Path:
    """Stage a local model for a test and return its manifest."""
    manifest = folder / "manifest.json"
    stage_model(
        str(model),
        manifest,
        revision=None,
        stage_to=None,
        models_dir=folder / "models",
        trust_remote_code=False,
        layers=None,
        generated=folder / "generated",
        fingerprint="test",
    )
    return manifest


@contextmanager
def running_server(model: Path, folder: Path, **flags: Any) -> Iterator[RunningServer]:
    """Serve a model as a job would, on a lease of the test's own."""
    manifest = load_manifest(stage_locally(model, folder))
    with (
        lease_devices(1, select_devices(["cpu"]), folder=folder / "leases") as lease,
        start_server(
            flags=flags,
            model=dict(manifest),
            tensor_parallel=1,
            lease=lease,
            folder=folder,
            stand_in=ROOT / "envs" / "cpu" / "stand_in",
        ) as server,
    ):
        server.wait_ready(600)
        yield RunningServer(server.url, server.model_name, model)


@pytest.fixture(scope="module")
def smollm2_server(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server of the demo's model."""
    with running_server(demo_model, tmp_path_factory.mktemp("smollm2")) as server:
        yield server


@pytest.fixture(scope="module")
def qwen36_server(
    tiny_qwen36: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server of the miniature Qwen3.6, with the production configuration's parsers."""
    parsers = {"reasoning-parser": "qwen3", "tool-call-parser": "qwen3_coder"}
    with running_server(tiny_qwen36, tmp_path_factory.mktemp("qwen36"), **parsers) as server:
        yield server


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Run:
    """The real workflow on three of the demo's prompts of each kind: real servers, real model, greedy.

    A canary of 4 prompts, and 2 shards of what it leaves.
    """
    tree = copy_tree(tmp_path_factory.mktemp("run") / "tree")
    prompts = tree / "prompts.jsonl"
    write_some_of_each_source(ROOT / "config" / "demo_prompts.jsonl", prompts, 3)
    with open(prompts, "a", encoding="utf-8") as more:
        more.writelines(
            json.dumps({"id": name, "turns": turns}) + "\n" for name, turns in BRIEF.items()
        )
    config = write_config(
        tree,
        run="small",
        prompts={"path": str(prompts), "shards": 2},
        plan={"canary": 4},
        model={"source": str(demo_model)},
        sampling={"temperature": 0, "top_p": 1, "max_tokens": 96},
        audit={"limits": {"truncated_share": 1}},
        hidden_states={"formats": ["specforge", "speculators", "modelopt"]},
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
