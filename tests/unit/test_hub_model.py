"""Models from the hub, fetched by the real client from a hub on this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rebuild.files import sha256_file
from tests.support.hub import COMMIT, Hub, run_hub
from tests.support.packages import REPOSITORY

REPO = "someone/tiny-llama"
STAGE = """
import json, sys
from pathlib import Path
from stage_model import stage_model

stage_model(**json.loads(sys.argv[1]) | {key: Path(value) for key, value in json.loads(sys.argv[2]).items()})
"""


@pytest.fixture
def repository(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny model as it is published: with a readme, pickled weights and a folder of something else."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "repository"))
    (folder / "README.md").write_text("# tiny")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


def stage(
    folder: Path, endpoint: str, source: str, revision: str | None = None, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    """Stage a model in a process of its own: the client reads its settings when it is imported."""
    plain = {
        "source": source,
        "revision": revision,
        "trust_remote_code": False,
        "layers": None,
        "fingerprint": "f",
    }
    paths = {
        "manifest": str(folder / "manifest.json"),
        "models_dir": str(folder / "models"),
        "generated": str(folder / "generated"),
    }
    return subprocess.run(
        [sys.executable, "-c", STAGE, json.dumps(plain | {"stage_to": None}), json.dumps(paths)],
        env=os.environ
        | {
            "PYTHONPATH": f"{REPOSITORY / 'workflow' / 'scripts'}:{os.environ.get('PYTHONPATH', '')}",
            "HF_ENDPOINT": endpoint,
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HUB_DISABLE_XET": "1",
            "HOME": str(folder),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def sent_files(hub: Hub) -> set[str]:
    return {name for name, _ in hub.sent}


def test_a_branch_is_resolved_to_its_commit_and_only_the_models_files_are_fetched(
    repository: Path, tmp_path: Path
) -> None:
    with run_hub(repository, REPO) as hub:
        done = stage(tmp_path, hub.url, f"hub:{REPO}@main")
        assert done.returncode == 0, done.stderr
        manifest = manifest_of(tmp_path)
        assert manifest["revision"] == COMMIT
        assert f"set model.revision: {COMMIT}" in done.stderr
        folder = tmp_path / "models" / f"someone--tiny-llama-{COMMIT[:12]}"
        assert manifest["path"] == str(folder)
        assert {path.name for path in folder.iterdir()} == set(manifest["files"])
        assert sent_files(hub) == set(manifest["files"])
        weights = sha256_file(repository / "model.safetensors")
        assert manifest["files"]["model.safetensors"]["sha256"] == weights


def test_a_pinned_commit_that_was_fetched_needs_no_network(
    repository: Path, tmp_path: Path
) -> None:
    with run_hub(repository, REPO) as hub:
        first = stage(tmp_path, hub.url, f"hub:{REPO}@{COMMIT}")
        assert first.returncode == 0, first.stderr
    again = stage(tmp_path, "http://127.0.0.1:1", f"hub:{REPO}", COMMIT, offline=True)
    assert again.returncode == 0, again.stderr


def test_a_download_that_broke_off_goes_on_where_it_was(repository: Path, tmp_path: Path) -> None:
    with run_hub(repository, REPO, cut="model.safetensors") as hub:
        for _ in range(2):
            done = stage(tmp_path, hub.url, f"hub:{REPO}@{COMMIT}")
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stderr
        starts = [start for name, start in hub.sent if name == "model.safetensors"]
    assert starts[0] == 0
    assert starts[-1] > 0
    folder = Path(manifest_of(tmp_path)["path"])
    assert sha256_file(folder / "model.safetensors") == sha256_file(
        repository / "model.safetensors"
    )


def test_offline_mode_is_respected_and_said(tmp_path: Path) -> None:
    done = stage(tmp_path, "http://127.0.0.1:1", f"hub:{REPO}@main", offline=True)
    assert done.returncode != 0
    assert "HF_HUB_OFFLINE forbids it" in done.stderr


def test_an_unknown_repository_and_an_unreachable_hub_are_said(
    repository: Path, tmp_path: Path
) -> None:
    with run_hub(repository, REPO) as hub:
        unknown = stage(tmp_path, hub.url, "hub:someone/else@main")
    assert "cannot be fetched from the hub" in unknown.stderr
    assert "someone/else@main" in unknown.stderr
    unreachable = stage(tmp_path, "http://127.0.0.1:1", f"hub:{REPO}@main")
    assert "cannot be fetched from the hub" in unreachable.stderr
