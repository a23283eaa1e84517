"""Builds the NVML stub and says how a process gets to see it."""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("stub_nvml.c")


def build_stub(folder: Path) -> Path:
    """Compile the stub into `folder` and return the folder."""
    library = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, SOURCE]
    subprocess.run(command, check=True)
    return folder


def stub_environment(folder: Path, count: int = 4, **settings: str) -> dict[str, str]:
    """Return an environment in which NVML is the stub with `count` GPUs; settings as in its source."""
    clean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**clean, "LD_LIBRARY_PATH": str(folder), "STUB_NVML_COUNT": str(count), **settings}
