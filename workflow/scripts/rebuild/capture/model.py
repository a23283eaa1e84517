"""The target model in transformers: the whole of it for checks, then cut off after the last wanted layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.utils import logging

from rebuild.capture.memory import free_memory, is_out_of_memory
from rebuild.errors import StepError
from rebuild.states.captured import Wanted
from rebuild.states.layers import check_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS_SHARE = 0.9  # of a device's free memory; the rest is for activations and captured states


@dataclass(frozen=True)
class Whole:
    """A causal language model and the text decoder in it, over devices of which the first takes the token ids."""

    model: Any
    decoder: Any
    devices: tuple[torch.device, ...]


@dataclass(frozen=True)
class Target:
    """A decoder that computes what is wanted and nothing more; states are gathered on the last of its devices."""

    decoder: Any
    wanted: Wanted
    devices: tuple[torch.device, ...]

    @property
    def hidden_size(self) -> int:
        """H, the width of a state."""
        return int(self.decoder.config.hidden_size)


def load_whole(
    folder: Path, *, dtype: str, devices: Sequence[str], trust_remote_code: bool = False
) -> Whole:
    """Load the model of `folder` with its final norm and its head, computing in `dtype`, over exactly these devices.

    A multimodal checkpoint gives its text model alone where transformers has a class for that (Qwen3.5 and 3.6 do).

    Raises:
        StepError: the files do not fill the model, which transformers would make up at random; the devices do not
            hold it; or it is not a stack of layers with a norm after them.
    """
    logging.disable_progress_bar()
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        model, loading = model_class(AutoConfig.from_pretrained(folder, **options)).from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            attn_implementation="sdpa",
            output_loading_info=True,
            **placement(devices),
            **options,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise does_not_fit(folder, devices, str(error).strip().partition("\n")[0]) from error
    check_loading(folder, loading)
    check_placement(folder, devices, getattr(model, "hf_device_map", {}))
    decoder = model.eval().get_decoder()
    check_stack(folder, decoder)
    return Whole(model, decoder, tuple(map(torch.device, devices)))


def model_class(config: Any) -> Any:
    """Return the auto class that loads the text model with its head, the whole multimodal one if there is no other."""
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return AutoModelForCausalLM if causal or remote else AutoModelForImageTextToText


def placement(devices: Sequence[str]) -> dict[str, Any]:
    """Return what `from_pretrained` is told about devices: the only one, or all of them with their free memory."""
    if len(devices) == 1:
        return {"device_map": devices[0]}
    free = {
        torch.device(name).index: int(torch.cuda.mem_get_info(name)[0] * WEIGHTS_SHARE)
        for name in devices
    }
    return {"device_map": "balanced", "max_memory": free}


def check_loading(folder: Path, loading: Mapping[str, Any]) -> None:
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


def check_placement(folder: Path, devices: Sequence[str], placed: Mapping[str, Any]) -> None:
    """Stop if a part of the model went elsewhere, as accelerate silently does with what the devices do not hold.

    `placed` is transformers' `hf_device_map`, empty for a model on one device.
    """
    allowed = {*devices, *(torch.device(name).index for name in devices)}
    strays = {
        part: where
        for part, where in placed.items()
        if (str(where) if isinstance(where, torch.device) else where) not in allowed
    }
    if strays:
        part, where = next(iter(strays.items()))
        seen = (
            f"{len(strays)} parts of it would be run from elsewhere, the first {part} from {where}"
        )
        raise does_not_fit(folder, devices, seen)


def does_not_fit(folder: Path, devices: Sequence[str], seen: str) -> StepError:
    """Return the error for a model that is larger than its devices."""
    return StepError(
        "the model does not fit on the devices of this job",
        where=str(folder),
        expected=f"its weights within {WEIGHTS_SHARE:.0%} of the free memory of {', '.join(devices)}",
        seen=seen,
        remedy="give the job more devices, end what else is on them (nvidia-smi), or set hidden_states.dtype: bfloat16",
    )


def check_stack(folder: Path, decoder: Any) -> None:
    """Stop unless the decoder has `layers` and, after them, `norm`, the names that nearly all have them under."""
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not isinstance(
        getattr(decoder, "norm", None), nn.Module
    ):
        raise StepError(
            "this architecture cannot be captured with transformers",
            where=str(folder),
            expected="a text decoder with a list `layers` and a final `norm`",
            seen=f"{type(decoder).__name__} with {', '.join(name for name, _ in decoder.named_children())}",
            remedy="capture with the serving engine: hidden_states.backend: sglang",
        )


def cut(whole: Whole, wanted: Wanted) -> Target:
    """Return the model without what is not wanted: its head, the layers after the last wanted one, and the final norm.

    The whole is taken apart: it computes nothing from then on. All layers stay where the final state is wanted, and
    the norm where it is wanted normed.

    Raises:
        StepError: a wanted layer is not one of the model's.
    """
    decoder = whole.decoder
    count = len(decoder.layers)
    if wanted.layers:
        check_layers(wanted.layers, count)
    final = wanted.pre_norm or wanted.post_norm
    keep_layers(decoder, count if final else wanted.layers[-1] + 1)
    if not wanted.post_norm:
        decoder.norm = nn.Identity()
    whole.model.set_output_embeddings(None)
    free_memory()
    return Target(decoder, wanted, whole.devices)


def keep_layers(decoder: Any, count: int) -> None:
    """Remove the layers after the first `count`, and make the config say so."""
    decoder.layers = decoder.layers[:count]
    decoder.config.num_hidden_layers = count
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(decoder.config, name, None):
            setattr(decoder.config, name, kinds[:count])
