"""The devices that servers and extraction may use: GPUs as NVML reports them, or CPU slots."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rebuild.errors import StepError

GIB = 1 << 30
NO_DEVICES = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide every GPU

Setting = str | list[str | int]


@dataclass(frozen=True)
class Device:
    """One GPU, or one CPU slot (a place for one server on the CPU)."""

    id: str  # what a person calls it: `gpu:0`, `cpu`, `cpu:1`
    kind: Literal["gpu", "cpu"]
    index: int | None  # of a GPU in PCI bus order, among those that this process may use
    uuid: str  # the key of its lease; the same in every process and container of the node
    name: str
    memory_bytes: int


def select_devices(setting: Setting, environ: Mapping[str, str] = os.environ) -> list[Device]:
    """Return the devices that `devices` in the config stands for, in the order of the setting.

    `auto` is every GPU that CUDA_VISIBLE_DEVICES leaves visible, or one CPU slot where there is no
    NVIDIA driver. A list names GPU indices, the beginnings of GPU UUIDs, or `cpu`, `cpu:0`, `cpu:1`.

    Raises:
        StepError: a device that is not there, named twice, or hidden by an unreadable driver.
    """
    if setting == "auto":
        return visible_gpus(environ) or [cpu_slot("cpu")]
    names = [str(name) for name in ([setting] if isinstance(setting, str) else setting)]
    wanted = [name for name in names if not is_cpu_slot(name)]
    gpus = visible_gpus(environ) if wanted else []
    chosen = [cpu_slot(name) if is_cpu_slot(name) else find_gpu(name, gpus) for name in names]
    if not chosen or len({device.uuid for device in chosen}) < len(chosen):
        raise StepError(
            "the config key `devices` names no device, or one of them twice",
            seen=", ".join(names) or "an empty list",
            remedy="write `devices: auto`, or a list in which every device stands once",
        )
    return chosen


def device_limit(setting: Setting) -> int:
    """Return how many devices this node offers: the default for Snakemake's `gpu` resource.

    A list counts as it stands, without asking the driver: the node that plans may have no GPU.
    """
    return len(select_devices("auto")) if setting == "auto" else len(setting)


def is_cpu_slot(name: str) -> bool:
    """Tell whether `name` is `cpu` or `cpu:<number>`."""
    return name == "cpu" or (name.startswith("cpu:") and name[4:].isdecimal())


def cpu_slot(name: str) -> Device:
    """Return the CPU slot of that name; its memory is the node's."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(id=name, kind="cpu", index=None, uuid=name, name="CPU", memory_bytes=memory)


def find_gpu(name: str, gpus: list[Device]) -> Device:
    """Return the GPU with that index, or whose UUID begins with `name`."""
    found = [gpu for gpu in gpus if name == str(gpu.index) or is_uuid_of(name, gpu)]
    if len(found) == 1:
        return found[0]
    raise StepError(
        f"device {name!r} of the config key `devices` names {len(found)} GPUs, not one",
        expected="a GPU index, the beginning of one GPU's UUID, `cpu` or `cpu:<number>`",
        seen=list_gpus(gpus),
        remedy="correct `devices`, or look at CUDA_VISIBLE_DEVICES and nvidia-smi",
    )


def is_uuid_of(name: str, gpu: Device) -> bool:
    """Tell whether `name` is a beginning of the GPU's UUID that says more than `GPU-`."""
    return len(name) > len("GPU-") and gpu.uuid.startswith(name)


def list_gpus(gpus: list[Device]) -> str:
    """Return one line that names the GPUs for a message."""
    lines = [
        f"{gpu.index} = {gpu.uuid} ({gpu.name}, {gpu.memory_bytes // GIB} GiB)" for gpu in gpus
    ]
    return "; ".join(lines) or "no GPU"


def visible_gpus(environ: Mapping[str, str]) -> list[Device]:
    """Return the GPUs that this process may use, CUDA_VISIBLE_DEVICES (a scheduler's, say) respected.

    Raises:
        StepError: CUDA_VISIBLE_DEVICES names a GPU that is not there, or the driver is in disorder.
    """
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None and allowed.strip() in NO_DEVICES:
        return []
    gpus = all_gpus()
    if allowed is None:
        return gpus
    try:
        return [find_gpu(name.strip(), gpus) for name in allowed.split(",") if name.strip()]
    except StepError as error:
        raise StepError(
            f"CUDA_VISIBLE_DEVICES={allowed} names a GPU that this process cannot use",
            expected="indices (in PCI bus order) or UUIDs of whole GPUs",
            seen=list_gpus(gpus),
            remedy="unset it or set it to GPUs that nvidia-smi lists; to work on the CPU, say "
            "`devices: [cpu]` in the config",
        ) from error


def all_gpus() -> list[Device]:
    """Return the node's GPUs that the driver lets this process open, in PCI bus order; [] without a driver.

    Raises:
        StepError: there is a driver but it cannot be used (library and kernel versions differ, a GPU is lost).
    """
    import pynvml  # here, because the Snakefile asks for devices and should start quickly

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:
        raise driver_disorder(error) from error
    try:
        handles = open_handles(pynvml)
        return [read_gpu(pynvml, index, handle) for index, handle in enumerate(handles)]
    except pynvml.NVMLError as error:
        raise driver_disorder(error) from error
    finally:
        pynvml.nvmlShutdown()


def open_handles(pynvml: Any) -> list[Any]:
    """Return NVML's handles of the GPUs that this process may open (a container or cgroup hides others)."""
    handles = []
    for number in range(pynvml.nvmlDeviceGetCount()):
        try:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(number))
        except pynvml.NVMLError_NoPermission:
            continue
    return handles


def read_gpu(pynvml: Any, index: int, handle: Any) -> Device:
    """Return what NVML says of one GPU."""
    return Device(
        id=f"gpu:{index}",
        kind="gpu",
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def driver_disorder(error: Exception) -> StepError:
    """Return the error for a node that has an NVIDIA driver which does not answer properly."""
    return StepError(
        "the NVIDIA driver is there but cannot be asked for its GPUs",
        expected="NVML to list the GPUs, or no NVIDIA driver at all",
        seen=f"NVML says: {error}",
        remedy="see what nvidia-smi says; after a driver update reload the kernel module or reboot; "
        "to work on the CPU, say `devices: [cpu]` in the config",
    )
