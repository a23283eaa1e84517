"""Reads the states that the hook in the server has written, and holds them against what was asked for."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rebuild.capture.engine_flags import Layers
from rebuild.errors import StepError
from rebuild.states.captured import Captured, Wanted


def read_states(
    path: Path, ids: Sequence[int], wanted: Wanted, layers: Layers, hidden_size: int, where: str
) -> Captured:
    """Return what a file of the hook holds, after checking that it is this sample's, and all of it.

    Raises:
        StepError: other ids, or tensors of other shapes.
    """
    # load_file maps the file, which is about to be removed
    tensors = {name: states.clone() for name, states in load_file(path).items()}
    check_ids(tensors["token_ids"].tolist(), list(ids), where)
    rows, count = len(ids), len(layers.taps)
    shapes = {"taps": (rows, count, hidden_size)} if count else {}
    last = wanted.pre_norm or layers.last
    finals = [name for name, had in (("pre_norm", last), ("post_norm", wanted.post_norm)) if had]
    check_shapes(tensors, shapes | dict.fromkeys(finals, (rows, hidden_size)), where)
    parts = [tensors["taps"]] if count else []
    parts += [tensors["pre_norm"][:, None]] if layers.last else []
    taps = torch.cat(parts, 1) if parts else torch.empty(rows, 0, hidden_size, dtype=torch.bfloat16)
    pre_norm = tensors["pre_norm"] if wanted.pre_norm else None
    return Captured(taps, pre_norm, tensors.get("post_norm"))


def check_ids(seen: list[int], expected: list[int], where: str) -> None:
    """Stop unless the server has computed the sample's ids, all of them."""
    if seen == expected:
        return
    pairs = itertools.zip_longest(expected, seen)
    at, (ours, theirs) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    raise StepError(
        "the server computed other tokens than the sample's",
        where=where,
        expected=f"{len(expected)} ids, {ours} at place {at}",
        seen=f"{len(seen)} ids, {theirs} at place {at}",
        remedy="something between sample and model adds or cuts tokens: look for it in `server.flags`",
    )


def check_shapes(
    tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], where: str
) -> None:
    """Stop unless all states are there, in their shapes, in bfloat16."""
    seen = {name: states for name, states in tensors.items() if name != "token_ids"}
    shapes = {name: tuple(states.shape) for name, states in seen.items()}
    if shapes == expected and all(states.dtype == torch.bfloat16 for states in seen.values()):
        return
    raise StepError(
        "the server captured states of another shape",
        where=where,
        expected=f"bfloat16 of {expected}",
        seen=", ".join(
            f"{name}: {states.dtype} of {shapes[name]}" for name, states in seen.items()
        ),
        remedy="this SGLang lays out its states otherwise: set hidden_states.backend: transformers",
    )
