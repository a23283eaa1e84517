"""The plug-in's entry point: SGLang calls `activate` when it is first imported, in each of its processes."""

import importlib.util
import logging
import os
import sys

from sglang_cpu_stand_in.guard import refuse_beside_gpu
from sglang_cpu_stand_in.placeholders import PlaceholderFinder

SGLANG_CPU_PLATFORM = "sglang.srt.platforms.cpu.CpuSRTPlatform"
GATED_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward"

logger = logging.getLogger(__name__)


def activate() -> str | None:
    """Make this process ready to serve on the CPU and name SGLang's own CPU platform; None where that was not asked for.

    Raises ImportError beside an NVIDIA GPU. Where a real `sgl_kernel` is installed, that one is used.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return None
    refuse_beside_gpu()
    provide_torchvision()
    if importlib.util.find_spec("sgl_kernel") is not None:
        logger.warning("The CPU stand-in steps aside: a real sgl_kernel is installed.")
    else:
        provide_sgl_kernel()
    return SGLANG_CPU_PLATFORM


def provide_torchvision() -> None:
    """Give SGLang's image code the names it imports from torchvision, unless that is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers remembers the true answer, which is no
    sys.meta_path.append(PlaceholderFinder("torchvision", {}))


def provide_sgl_kernel() -> None:
    """Give SGLang the names it imports from sgl_kernel, and the operators that it calls on a CPU."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_cpu_stand_in import kernels

    sys.meta_path.append(PlaceholderFinder("sgl_kernel", kernels.MODULES))
    for operator in kernels.OPERATORS:
        setattr(torch.ops.sgl_kernel, operator.__name__, operator)
    HookRegistry.register(GATED_NORM, kernels.gated_rms_norm, HookType.REPLACE)
