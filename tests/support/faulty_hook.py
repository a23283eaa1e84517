"""The hook of a capturing server, with a fault that a test turns on and off: what the engine might hand over one day.

The server's environment names the file that holds the fault, as JSON: its `kind`, and the length of the samples that it
befalls (any, where it is null).
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from rebuild.capture import engine_hook

VARIABLE = "REBUILD_TEST_FAULT"


def make_hook(config: dict[str, Any]) -> engine_hook.Hook:
    """Return the real hook behind the fault."""
    hook = engine_hook.make_hook(config)
    count, faults = config["taps"], Path(os.environ[VARIABLE])

    def faulty(module: Any, args: tuple[Any, ...], output: Any) -> None:
        if faults.exists() and not isinstance(output, torch.Tensor | tuple):
            fault = json.loads(faults.read_text())
            if args[3].forward_mode.is_extend():
                args = spoil(args, count, fault["kind"], fault["length"])
        hook(module, args, output)

    return faulty


def spoil(args: tuple[Any, ...], count: int, kind: str, length: int | None) -> tuple[Any, ...]:
    """Return the logits processor's arguments with the fault in the samples of that length."""
    ids, normed, head, forward, taps, *more = args
    taps = [states.clone() for states in engine_hook.split_taps(taps, count)]
    ids, start = ids.clone(), 0
    for rows in forward.extend_seq_lens_cpu:
        piece = slice(start, start + int(rows))
        start += int(rows)
        if length is not None and int(rows) != length:
            continue
        if kind == "nan":
            taps[1][piece][int(rows) // 2] = torch.nan
        elif kind == "zero":
            taps[2][piece] = 0
        elif kind == "next layer":
            taps[1][piece] = taps[2][piece]
        elif kind == "previous token":
            taps[0][piece] = taps[0][piece].roll(1, 0)
        elif kind == "louder":
            taps[0][piece] *= 8
        elif kind == "other ids":
            ids[piece] += 1
    return (ids, normed, head, forward, taps, *more)
