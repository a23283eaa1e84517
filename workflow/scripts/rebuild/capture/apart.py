"""Plain references from a process of its own, so that the devices are free again afterwards."""

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rebuild.capture.forward import plain_reference
from rebuild.capture.model import load_whole
from rebuild.errors import StepError
from rebuild.states.reference import Reference
from rebuild.step import die_with_parent

FIELDS = ("what", "where", "expected", "seen", "remedy")  # of a StepError
ENDS_WITHIN_S = 60.0  # after its last word, with its traceback in the log


@dataclass(frozen=True)
class Request:
    """What the process is asked for; see `references_apart`."""

    model: Path
    sequences: Sequence[Sequence[int]]
    folder: Path
    dtype: str
    devices: Sequence[str]
    trust_remote_code: bool
    temperatures: Sequence[float]


def references_apart(
    model: Path,
    sequences: Sequence[Sequence[int]],
    *,
    folder: Path,
    dtype: str,
    devices: Sequence[str],
    trust_remote_code: bool = False,
    temperatures: Sequence[float] = (),
) -> list[Reference]:
    """Return `plain_reference` of each sequence by the model in a folder, computed in another process that then ends.

    The results pass through one file a sequence in `folder`, which are gone afterwards.

    Raises:
        StepError: what stopped the process, in its own words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = Request(model, sequences, folder, dtype, devices, trust_remote_code, temperatures)
    try:
        run_apart(request)
        return [read_reference(path) for path in result_files(request)]
    finally:
        for path in result_files(request):
            path.unlink(missing_ok=True)


def result_files(request: Request) -> list[Path]:
    """Return the files that the results pass through, one a sequence."""
    return [
        request.folder / f"reference-{number}.safetensors"
        for number in range(len(request.sequences))
    ]


def run_apart(request: Request) -> None:
    """Have a fresh process write the results, and wait for its end; it cannot outlive this one."""
    context = get_context("spawn")  # a fork would inherit what CUDA and threads cannot share
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=write_references, args=(request, os.getpid(), sender))
    process.start()
    sender.close()
    try:
        failure = receiver.recv()
        process.join(ENDS_WITHIN_S)
    except EOFError:
        process.join()
        raise StepError(
            "the reference could not be computed: its process ended without a word",
            where=str(request.model),
            expected=f"references of {len(request.sequences)} samples",
            seen=describe_exit(process.exitcode),
            remedy="look above in this log; after signal 9 see whether the machine's memory ran out (dmesg)",
        ) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if failure is not None:
        raise StepError(**failure)


def describe_exit(code: int | None) -> str:
    """Return how a process ended, in words."""
    return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def write_references(request: Request, starter: int, sender: Connection) -> None:
    """Compute and write the references, one file each, and send None, or else what stopped it."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != starter:
        raise SystemExit("the process that asked for references has ended")
    with ExitStack() as stack:
        stack.push(partial(report_end, sender, request))
        whole = load_whole(
            request.model,
            dtype=request.dtype,
            devices=request.devices,
            trust_remote_code=request.trust_remote_code,
        )
        for path, sequence in zip(result_files(request), request.sequences, strict=True):
            write_reference(path, plain_reference(whole, sequence, request.temperatures))


def report_end(
    sender: Connection,
    request: Request,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Send how the work ended: None, or the fields of a StepError that says so."""
    if error is None:
        sender.send(None)
    elif isinstance(error, StepError):
        sender.send({field: getattr(error, field) for field in FIELDS})
    else:
        sender.send(
            {
                "what": "the reference could not be computed",
                "where": str(request.model),
                "seen": f"{type(error).__name__}: {error}",
                "remedy": "its traceback is above in this log",
            }
        )


def write_reference(path: Path, reference: Reference) -> None:
    """Write one reference as named tensors, one of log-probabilities for each temperature."""
    tensors = {
        "positions": torch.tensor(reference.positions),
        "layers": reference.layers,
        "post_norm": reference.post_norm,
    }
    logprobs = {
        f"logprobs {key!r}": torch.from_numpy(value) for key, value in reference.logprobs.items()
    }
    save_file(tensors | logprobs, path)


def read_reference(path: Path) -> Reference:
    """Read what `write_reference` wrote."""
    tensors: dict[str, Tensor] = load_file(path)
    logprobs = {
        float(name.split()[1]): values.numpy()
        for name, values in sorted(tensors.items())
        if name.startswith("logprobs ")
    }
    return Reference(
        tensors["positions"].tolist(), tensors["layers"], tensors["post_norm"], logprobs
    )
