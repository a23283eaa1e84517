"""This repository as somebody has it who has just cloned it, and commands run in it as they would type them."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.trees import ROOT, environment

NOT_CLONED = {".git", ".venv", ".cache", ".snakemake", "results", "resources"}


def repository_files() -> list[Path]:
    """Return what a commit of everything would hold, relative to the root; without git, all but what runs leave behind."""
    if not (ROOT / ".git").exists():
        found = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
        return [path for path in found if not NOT_CLONED.intersection(path.parts)]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


def clone(target: Path) -> Path:
    """Copy the repository's files to `target` and return it."""
    for file in repository_files():
        copy = target / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy)
    return target


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in `folder` as in the activated environment; output of both kinds is in `stdout`."""
    environ = environment(folder)
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
