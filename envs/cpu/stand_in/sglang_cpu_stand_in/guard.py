"""Refuses to stand in where a real kernel should run."""

import os
from pathlib import Path

NVIDIA_TRACES = ("/dev/nvidiactl", "/proc/driver/nvidia")
OVERRIDE = "SGLANG_CPU_STAND_IN_BESIDE_GPU"


def refuse_beside_gpu() -> None:
    """Raise ImportError if this machine has an NVIDIA driver, unless the override says that the CPU is meant."""
    traces = [path for path in NVIDIA_TRACES if Path(path).exists()]
    if traces and os.environ.get(OVERRIDE) != "1":
        raise ImportError(
            f"The CPU stand-in for sgl_kernel refuses to run on a machine with an NVIDIA GPU ({traces[0]} exists): "
            "install envs/gpu/requirements.txt and start SGLang without SGLANG_USE_CPU_ENGINE, "
            f"or set {OVERRIDE}=1 if this server is really meant to run on the CPU."
        )
