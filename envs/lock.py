"""Resolve an environment's requirements.in with pip and write its lock, and the conda file with the same pins.

    python3.11 envs/lock.py gpu      # then cpu, whose pins follow gpu's; then dev, which goes beside either

Nothing is installed. Only the package index decides: wheels that a machine's own configuration offers are ignored.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ENVS = Path(__file__).resolve().parent
LOWEST_PYTHON = (
    3,
    11,
)  # what resolves there has wheels for later versions too, but not the other way round
SOURCE_ONLY = "connection_pool"  # has no wheel
TORCH_STACK = ("torch", "torchvision", "triton")
TITLES = {
    "gpu": "for Linux x86-64 and Python 3.11 or 3.12",
    "cpu": "for Python 3.11 to 3.13",
    "dev": "for development beside either of the others",
}


def read_pins(lock: Path) -> dict[str, str]:
    """Return the version of every package that a lock pins, in the lock's order."""
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def is_cuda(name: str) -> bool:
    """Tell whether a package is part of CUDA: PyPI's torch brings it along, a CPU build of torch does not."""
    return name.startswith(("nvidia-", "cuda-")) and name != "nvidia-ml-py"


def index_only_environment() -> dict[str, str]:
    """Return an environment in which pip reads no configuration file and knows no wheels beside the index."""
    unwanted = {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def dry_run(arguments: Iterable[str]) -> list[dict[str, Any]]:
    """Return what `pip install` would install: the packages of its report, with file and metadata.

    Raises CalledProcessError, with pip's own words on standard error, if it cannot be resolved.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--only-binary=:all:", f"--no-binary={SOURCE_ONLY}"]
        command += ["--report", str(report), *arguments]
        subprocess.run(command, check=True, env=index_only_environment(), stdout=sys.stderr)
        packages: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return packages


def resolve(requirements: Sequence[Path], constraints: dict[str, str]) -> dict[str, str]:
    """Return the newest versions that meet all requirement files and constraints, by package name."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in constraints.items())
        file.flush()
        arguments = [word for path in requirements for word in ("-r", str(path))]
        packages = dry_run([*arguments, "-c", file.name])
    found = ((item["metadata"]["name"], item["metadata"]["version"]) for item in packages)
    return dict(sorted(found, key=lambda pin: pin[0].lower()))


def resolve_kind(kind: str) -> dict[str, str]:
    """Return the pins of one kind; those of cpu and dev leave CUDA to PyPI's torch, which pins it."""
    if kind == "gpu":
        return resolve([ENVS / "gpu/requirements.in"], {})
    if kind == "cpu":
        gpu = read_pins(ENVS / "gpu/requirements.txt")
        shared = {n: v for n, v in gpu.items() if n not in TORCH_STACK and not is_cuda(n)}
        pins = resolve([ENVS / "cpu/requirements.in"], shared)
        return {name: version for name, version in pins.items() if not is_cuda(name)}
    cpu = read_pins(ENVS / "cpu/requirements.txt")
    pins = resolve([ENVS / "cpu/requirements.txt", ENVS / "dev/requirements.in"], {})
    return {name: v for name, v in pins.items() if name not in cpu and not is_cuda(name)}


def write_lock(kind: str, pins: dict[str, str]) -> None:
    """Write the pins to the kind's requirements.txt."""
    head = f"# Lock of requirements.in, {TITLES[kind]}: every package, exactly. Made by envs/lock.py.\n"
    lines = [f"{name}=={version}\n" for name, version in pins.items()]
    (ENVS / kind / "requirements.txt").write_text(head + "".join(lines))


def write_conda(kind: str) -> None:
    """Write envs/KIND.yaml with the lock's pins, and beside it the script that installs what goes in without dependencies.

    The pins are repeated, since Snakemake copies the file away from the lock before conda reads it.
    """
    pins = read_pins(ENVS / kind / "requirements.txt")
    bare = read_pins(ENVS / kind / "requirements-no-deps.txt")
    head = f"# The pins of {kind}/requirements.txt, for `snakemake --sdm conda`. Made by envs/lock.py.\n"
    base = "channels:\n  - conda-forge\n  - nodefaults\ndependencies:\n  - python=3.11\n  - pip\n  - pip:\n"
    lines = [f"      - {name}=={version}\n" for name, version in pins.items()]
    (ENVS / f"{kind}.yaml").write_text(head + base + "".join(lines))
    install = " ".join(f"{name}=={version}" for name, version in bare.items())
    script = f"# Snakemake runs this after making the environment of {kind}.yaml.\nset -e\n"
    (ENVS / f"{kind}.post-deploy.sh").write_text(
        f"{script}python -m pip install --no-deps {install}\n"
    )


if __name__ == "__main__":
    if sys.version_info[:2] != LOWEST_PYTHON or sys.argv[1:] not in (["gpu"], ["cpu"], ["dev"]):
        sys.exit("usage: python3.11 envs/lock.py gpu|cpu|dev")
    kind = sys.argv[1]
    write_lock(kind, resolve_kind(kind))
    if kind != "dev":
        write_conda(kind)
