"""A fresh clone and what its Snakefile defines, both made once."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import clone, run

READ_SNAKEFILE = Path(__file__).with_name("read_snakefile.py")


@pytest.fixture(scope="session")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone that tests only read, or run commands in that leave nothing to trip over."""
    return clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="session")
def snakefile(cloned: Path) -> dict[str, Any]:
    """The clone's rules by name, and the libraries that parsing them loaded."""
    done = run(f"{sys.executable} {READ_SNAKEFILE} facts.json", cloned)
    assert done.returncode == 0, done.stdout
    facts: dict[str, Any] = json.loads((cloned / "facts.json").read_text())
    (cloned / "facts.json").unlink()
    return facts


@pytest.fixture(scope="session")
def steps(snakefile: dict[str, Any]) -> dict[str, Any]:
    """The rules that run something."""
    return {name: rule for name, rule in snakefile["rules"].items() if not rule["norun"]}


@pytest.fixture(scope="session")
def targets(snakefile: dict[str, Any]) -> dict[str, Any]:
    """The rules that only name what is wanted."""
    return {name: rule for name, rule in snakefile["rules"].items() if rule["norun"]}
