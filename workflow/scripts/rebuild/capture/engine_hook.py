"""Writes the hidden states of every prefilled sequence to a file; runs inside the server's process.

The server is started with a forward hook of this module (`--forward-hooks`) on two of its modules. The logits processor
gets all that is wanted of a batch: token ids, the engine's own auxiliary hidden states, and the output of the final
norm. What goes into that norm, the last layer's output, comes from the norm itself. Hooks on the layers would not do:
the engine keeps the residual stream apart from what layers return.

It imports nothing of this package: the server's environment need not have what the package needs.
"""

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

BATCHES_WAITING = 2  # copied from the device but not yet written; the engine waits for more
WHOLE, PART, FAILED = ".safetensors", ".part", ".failed"  # a request's file, by its state

Hook = Callable[[Any, tuple[Any, ...], Any], None]


@dataclass(frozen=True)
class Batch:
    """A prefilled batch of T tokens on the CPU: its requests, their lengths, and tensors with a row for each token."""

    names: list[str]  # "" for a request that is not ours
    lengths: list[int]
    token_ids: Tensor
    taps: list[Tensor]
    finals: dict[str, Tensor]


def make_hook(config: dict[str, Any]) -> Hook:
    """Return the hook for the logits processor and, when `pre_norm` is wanted, the final norm.

    `config` holds `folder`, where files go; `prefix`, with which the ids of requests begin whose states are wanted; the
    number of `taps`; and whether `pre_norm` and `post_norm` are wanted.
    """
    collector = Collector(config)

    def hook(_module: Any, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(
            output, Tensor | tuple
        ):  # a norm returns tensors, the logits processor an object
            collector.note_norm(args, output)
        else:
            collector.collect(*args)

    return hook


class Collector:
    """Takes the states of each prefilled batch from the engine's modules and hands them to a thread that writes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.folder = Path(config["folder"])
        self.before_norm: Tensor | None = None
        self.waiting: queue.Queue[Batch] = queue.Queue(BATCHES_WAITING)
        threading.Thread(target=self.write_all, name="state-writer", daemon=True).start()

    def note_norm(self, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        """Keep what the final norm normalized: its input, or the sum of its inputs, which it returns beside its output.

        The kernels for two inputs work in place, so that the inputs themselves cannot be trusted afterwards.
        """
        before = output[1] if isinstance(output, tuple) else args[0]
        self.before_norm = before.to(torch.bfloat16, copy=True)

    def collect(
        self,
        token_ids: Tensor,
        after_norm: Tensor,
        _head: Any,
        forward: Any,
        taps: Tensor | Sequence[Tensor] | None = None,
        *_more: Any,
    ) -> None:
        """Copy the wanted states of one prefill from the device; what is not a prefill of ours is let pass."""
        before_norm, self.before_norm = self.before_norm, None
        names = getattr(forward, "rids", None) or []
        names = [name if name.startswith(self.config["prefix"]) else "" for name in names]
        if not any(names) or not forward.forward_mode.is_extend() or not is_first_rank():
            return
        lengths = [int(length) for length in forward.extend_seq_lens_cpu]
        check_prefixes(names, forward.extend_prefix_lens_cpu)
        finals = {"pre_norm": before_norm, "post_norm": after_norm}
        wanted = {name: states for name, states in finals.items() if self.config[name]}
        split = split_taps(taps, self.config["taps"])
        check_rows([token_ids, *split, *wanted.values()], sum(lengths))
        self.hand_over(names, lengths, token_ids, split, wanted)

    def hand_over(
        self,
        names: list[str],
        lengths: list[int],
        token_ids: Tensor,
        taps: list[Tensor],
        finals: dict[str, Any],
    ) -> None:
        """Queue a batch for writing; a file's name is there before its request is answered, its content may follow."""
        total = sum(lengths)
        batch = Batch(
            names=names,
            lengths=lengths,
            token_ids=token_ids[:total].to(device="cpu", dtype=torch.int64, copy=True),
            taps=[to_cpu(states[:total]) for states in taps],
            finals={name: to_cpu(states[:total]) for name, states in finals.items()},
        )
        for name in filter(None, names):
            (self.folder / f"{name}{PART}").touch()
        self.waiting.put(batch)

    def write_all(self) -> None:
        """Write batches as they come, for as long as the process lives."""
        while True:
            write_batch(self.folder, self.waiting.get())


def is_first_rank() -> bool:
    """Return whether this process is the one that writes: states are whole on every tensor-parallel rank."""
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return not ready or distributed.get_rank() == 0


def check_prefixes(names: Sequence[str], prefixes: Sequence[int]) -> None:
    """Raise a RuntimeError, which ends the server, when some of a sequence's states were computed before this batch."""
    cut = [f"{name}: {prefix}" for name, prefix in zip(names, prefixes, strict=True) if prefix]
    if cut:
        raise RuntimeError(
            "states of a sequence's beginning are not in this batch (prefix cache, or a prefill in chunks): "
            + ", ".join(cut)
        )


def split_taps(taps: Tensor | Sequence[Tensor] | None, count: int) -> list[Tensor]:
    """Return the auxiliary hidden states one by one, whether the engine hands them over so or side by side."""
    if isinstance(taps, Tensor):
        taps = taps.chunk(count, dim=-1) if count else []
    found = [] if count == 0 else list(taps or [])
    if len(found) != count:
        raise RuntimeError(
            f"the engine's model handed over {len(found)} auxiliary hidden states, not {count}"
        )
    return found


def check_rows(tensors: Sequence[Tensor | None], total: int) -> None:
    """Raise a RuntimeError, which ends the server, when a tensor is absent or lacks rows for some tokens."""
    rows = [0 if states is None else len(states) for states in tensors]
    if any(count < total for count in rows):
        raise RuntimeError(
            f"a batch of {total} tokens came with {rows} rows of ids and states; a final norm that was not called, "
            "or states that are spread over devices, cannot be captured"
        )


def to_cpu(states: Tensor) -> Tensor:
    """Return a copy in bfloat16 in the machine's memory."""
    return states.to(device="cpu", dtype=torch.bfloat16, copy=True)


def write_batch(folder: Path, batch: Batch) -> None:
    """Write each sequence's states to its file: whole under its final name, or an empty one that says it failed."""
    start = 0
    for name, length in zip(batch.names, batch.lengths, strict=True):
        rows = slice(start, start + length)
        start += length
        if not name:
            continue
        part = folder / f"{name}{PART}"
        try:
            save_file(tensors_of(batch, rows), part)
            part.replace(folder / f"{name}{WHOLE}")
        except (OSError, SafetensorError):  # a full disk, say: whoever waits must learn of it
            traceback.print_exc(file=sys.stderr)
            part.replace(folder / f"{name}{FAILED}")


def tensors_of(batch: Batch, rows: slice) -> dict[str, Tensor]:
    """Return what the file of one sequence holds: token_ids [S], taps [S, D, H], and the wanted final states [S, H]."""
    tensors = {name: states[rows].contiguous() for name, states in batch.finals.items()}
    if batch.taps:
        tensors["taps"] = torch.stack([states[rows] for states in batch.taps], dim=1)
    return tensors | {"token_ids": batch.token_ids[rows].contiguous()}
