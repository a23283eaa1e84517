"""The command and the environment of an SGLang server: the only place where either is put together."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.serving.devices import Device

Flags = dict[str, Any]  # SGLang's flags without dashes -> true, a number, text, list or mapping

# Set here and nowhere else, because readiness, clean-up or the recipe depend on them: flag -> who decides.
GOVERNED = {
    "api-key": "servers listen on 127.0.0.1 only; for others use `server.external`",
    "base-gpu-id": "`devices`",
    "chat-template": "the template of `model.source`, which later phases rely on",
    "config": "`server.flags` itself",
    "data-parallel-size": "one server per device: raise `--resources gpu=`",
    "device": "`devices`",
    "dp-size": "one server per device: raise `--resources gpu=`",
    "enable-metrics": "always on: the watchdog counts tokens",
    "gpu-id-step": "`devices`",
    "grpc-mode": "the client speaks HTTP",
    "host": "always 127.0.0.1; for other servers use `server.external`",
    "log-level-http": "always warning",
    "model": "`model.source`",
    "model-path": "`model.source`",
    "nccl-port": "chosen anew for every start",
    "nnodes": "one server per node",
    "port": "chosen anew for every start",
    "preferred-sampling-params": "`sampling`",
    "revision": "`model.revision`",
    "sampling-defaults": "`sampling`",
    "served-model-name": "chosen anew for every start",
    "skip-server-warmup": "a server is ready when it has answered its warm-up",
    "skip-tokenizer-init": "the client needs the server's tokenizer",
    "ssl-certfile": "servers listen on 127.0.0.1 only",
    "ssl-keyfile": "servers listen on 127.0.0.1 only",
    "tensor-parallel-size": "`server.tensor_parallel`",
    "tokenizer-path": "`model.source`",
    "tokenizer-worker-num": "always 1",
    "tp-size": "`server.tensor_parallel`",
    "trust-remote-code": "`model.trust_remote_code`",
}
# What SGLang needs on a CPU with the stand-in for its kernels (float16 is slow there, and without
# max-total-tokens it takes most of the memory). Numbers are upper limits.
CPU_FLAGS: Flags = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "dtype": "float32",
    "max-total-tokens": 16384,
    "max-running-requests": 32,
}
CPU_HYBRID_FLAGS: Flags = {
    "mamba-radix-cache-strategy": "no_buffer",
    "disable-overlap-schedule": True,
    "disable-radix-cache": True,
    "max-mamba-cache-size": 16,
}
GPU_ONLY = ("mem-fraction-static", "enable-hierarchical-cache", "hicache-", "speculative-")


@dataclass(frozen=True)
class Purpose:
    """What a server needs for work other than answering: it goes before the user's flags and before a CPU's.

    `modules` is a folder of Python modules that the server's processes can import; `variables` are more variables of
    its environment.
    """

    flags: Flags = field(default_factory=dict)
    modules: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def server_arguments(
    flags: Flags,
    *,
    model: Mapping[str, Any],
    devices: list[Device],
    tensor_parallel: int,
    port: int,
    nccl_port: int,
    served_name: str,
    purpose: Purpose | None = None,
) -> list[str]:
    """Return SGLang's command line for one server of `model` (its manifest) on the leased devices.

    Raises:
        StepError: `flags` holds a flag that is not the user's to set.
    """
    refuse_governed(flags)
    ours: Flags = {
        "model-path": model["path"],
        "served-model-name": served_name,
        "host": "127.0.0.1",
        "port": port,
        "nccl-port": nccl_port,
        "tp-size": tensor_parallel,
        "tokenizer-worker-num": 1,
        "trust-remote-code": bool(model.get("trust_remote_code")),
        "enable-metrics": True,
        "log-level-http": "warning",
        "sampling-defaults": "openai",  # nothing that the request does not say comes from the model's files
    }
    given = ours | flags | cpu_overrides(flags, model=model, devices=devices)
    return render_flags(given | (purpose.flags if purpose else {}))


def cpu_overrides(flags: Flags, *, model: Mapping[str, Any], devices: list[Device]) -> Flags:
    """Return the flags that take the place of the user's where the devices are CPU slots (None: left out)."""
    if devices[0].kind != "cpu":
        return {}
    limits = CPU_FLAGS | (CPU_HYBRID_FLAGS if model["hybrid"] else {})
    dropped = {flag: None for flag in flags if flag.startswith(GPU_ONLY)}
    return {flag: limited(flags.get(flag), value) for flag, value in limits.items()} | dropped


def limited(given: Any, ours: Any) -> Any:
    """Return our value, or the user's where both are numbers and theirs is smaller."""
    numbers = type(given) is int and type(ours) is int
    return min(given, ours) if numbers else ours


def refuse_governed(flags: Flags) -> None:
    """Raise a StepError for flags that are decided elsewhere."""
    wrong = [flag for flag in flags if flag in GOVERNED]
    if wrong:
        raise StepError(
            f"`server.flags` sets what is decided elsewhere: {', '.join(wrong)}",
            expected="; ".join(f"{flag}: {GOVERNED[flag]}" for flag in wrong),
            remedy="take these flags out of `server.flags`",
        )


def render_flags(flags: Flags) -> list[str]:
    """Return the flags as arguments: true is a bare flag, false and null are left out, lists are several values."""
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{flag}")
        if isinstance(value, list):
            arguments.extend(str(item) for item in value)
        elif isinstance(value, dict):
            arguments.append(json.dumps(value))
        elif value is not True:
            arguments.append(str(value))
    return arguments


def server_environment(
    devices: list[Device],
    stand_in: Path,
    environ: Mapping[str, str] = os.environ,
    purpose: Purpose | None = None,
) -> dict[str, str]:
    """Return the environment of a server on these devices.

    `stand_in` is the folder that takes the place of SGLang's CUDA kernels: first on PYTHONPATH for a
    CPU slot, and kept off it for a GPU, where it would hide the real ones.
    """
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [path for path in paths if Path(path).resolve() != stand_in.resolve()]
    result = {**environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    result["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # its probe costs a second, and tokens
    if devices[0].kind == "cpu":
        paths.insert(0, str(stand_in.resolve()))
        result |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        result["SGLANG_PLATFORM"] = "cpu_stand_in"  # named, so that its refusal ends the server
    else:
        result.pop("SGLANG_USE_CPU_ENGINE", None)
        result.pop("SGLANG_PLATFORM", None)
        result.pop("OMP_NUM_THREADS", None)  # Snakemake sets it to the rule's threads
        # Indices, not UUIDs: SGLang's all-reduce reads this list as numbers.
        result["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        result["CUDA_VISIBLE_DEVICES"] = ",".join(str(device.index) for device in devices)
    if purpose:
        result |= purpose.variables
        paths += [str(purpose.modules.resolve())] if purpose.modules else []
    return result | {"PYTHONPATH": os.pathsep.join(paths)}
