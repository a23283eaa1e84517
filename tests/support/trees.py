"""Copies of the repository to run the real workflow in, and running it there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PARTS = ["Snakefile", "workflow", "config", "profiles", "envs"]
COMMANDS = {"show_masks", "verify_states"}  # scripts that people call, and no rule
NO_CANARY = {"plan": {"canary": 0}}


def copy_tree(folder: Path) -> Path:
    """Copy what the workflow needs of the repository, without any results, into `folder`."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / part, ignore=ignore)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / part)
    return folder


def write_config(folder: Path, **changes: Any) -> Path:
    """Write a configuration file with just these first-level keys, to be laid over the default; no canary unless given."""
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump(NO_CANARY | changes, allow_unicode=True))
    return path


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a test's run: offline, and with leases of its own."""
    leases = {"REBUILD_LEASE_DIR": str(folder / ".leases"), "HF_HUB_OFFLINE": "1"}
    return os.environ | leases


def snakemake_command(*arguments: str) -> list[str]:
    """Return the command line of the tests' own Snakemake."""
    return [sys.executable, "-m", "snakemake", *arguments]


def run_snakemake(
    folder: Path, *arguments: str, timeout_s: float = 900
) -> "subprocess.CompletedProcess[str]":
    """Run Snakemake in a copy of the tree, and return its exit status and output."""
    return subprocess.run(
        snakemake_command(*arguments),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
    )
