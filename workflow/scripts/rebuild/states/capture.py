"""Hidden states of one token sequence at chosen layers of a transformers model, and nothing beyond them.

One sequence per forward: the only way in which a sample's states do not depend on its neighbours.
It knows nothing of samples, files or formats.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

from rebuild.errors import StepError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Target:
    """A decoder cut off after its last wanted layer, on one device."""

    decoder: nn.Module
    layers: tuple[int, ...]
    hidden_size: int
    device: torch.device


def load_target(
    folder: Path,
    layers: Sequence[int],
    *,
    dtype: str,
    device: str,
    trust_remote_code: bool = False,
) -> Target:
    """Load the model of `folder` without its head, computing in `dtype` on `device`, and cut it to size.

    Raises:
        StepError: the folder's weights do not fill the model, which transformers would make up at random.
    """
    logging.disable_progress_bar()
    model, loading = AutoModel.from_pretrained(
        folder,
        dtype=DTYPES[dtype],
        device_map=device,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
    )
    check_loading(folder, loading)
    decoder = model.get_decoder()
    cut_after(decoder, layers[-1])
    decoder.eval().to(device)
    return Target(decoder, tuple(layers), decoder.config.hidden_size, torch.device(device))


def check_loading(folder: Path, loading: dict[str, Any]) -> None:
    """Stop if any weight of the model was not in the files, or had another shape."""
    wrong = {kind: list(loading[kind]) for kind in ("missing_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise StepError(
            "the model's files lack some of its weights",
            where=str(folder),
            expected="every weight of the model, in its shape",
            seen=", ".join(f"{len(keys)} {kind}: {keys[:3]}" for kind, keys in wrong.items()),
            remedy="stage the model again from a whole copy; its config.json must belong to its weights",
        )


def cut_after(decoder: Any, last: int) -> None:
    """Remove the layers after `last` and the final norm, and make the config say so."""
    decoder.layers = decoder.layers[: last + 1]
    decoder.norm = nn.Identity()
    decoder.config.num_hidden_layers = last + 1
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(decoder.config, name, None):
            setattr(decoder.config, name, kinds[: last + 1])


def capture(target: Target, input_ids: Sequence[int], dtype: str) -> Tensor:
    """Return the states of one sequence as [S, D·H] of `dtype` on the target's device, in layer order.

    Each layer's output is copied the moment it exists, so that no later layer can alter it.
    """
    shape = (len(input_ids), len(target.layers), target.hidden_size)
    states = torch.empty(shape, dtype=DTYPES[dtype], device=target.device)
    ids = torch.tensor([list(input_ids)], dtype=torch.int64, device=target.device)
    with torch.inference_mode(), tapped(target, states) as seen:
        target.decoder(input_ids=ids, use_cache=False)
    if seen != list(target.layers):
        raise StepError(
            "the model did not run each wanted layer once, in order",
            expected=f"outputs of layers {list(target.layers)}",
            seen=f"outputs of layers {seen}",
            remedy="this architecture's layers are not a plain stack; it cannot be captured this way",
        )
    return states.flatten(1)


@contextmanager
def tapped(target: Target, states: Tensor) -> Iterator[list[int]]:
    """Copy each wanted layer's output into its place of `states` [S, D, H]; yield the layers seen so far."""
    seen: list[int] = []

    def tap(place: int, layer: int, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        states[:, place].copy_(hidden[0])
        seen.append(layer)

    hooks = [
        target.decoder.get_submodule(f"layers.{layer}").register_forward_hook(
            lambda _module, _args, output, place=place, layer=layer: tap(place, layer, output)
        )
        for place, layer in enumerate(target.layers)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
