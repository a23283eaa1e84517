"""The formats by the names that `hidden_states.formats` has for them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rebuild.formats.contents import Content
from rebuild.formats.modelopt import conversation, pt_path
from rebuild.formats.safetensors_files import write_safetensors
from rebuild.formats.specforge import ckpt_path, dflash, eagle3
from rebuild.formats.speculators import fp8, hs_path, plain
from rebuild.formats.torch_files import write_torch
from rebuild.formats.writing import FileFacts
from rebuild.states.captured import Captured
from rebuild.states.samples import Sample


@dataclass(frozen=True)
class Format:
    """How one sample becomes one file.

    `path(sample_id, row)` is the file's place in the shard's folder, `row` counting the shard's samples from 0;
    `tensors(sample, captured, include_last)` is what the file holds; `write` puts it there, whole or not at all, the
    same bytes for the same sample. `key` and `dtype` are those of the layers' states in the file.
    """

    key: str
    dtype: str
    path: Callable[[str, int], str]
    tensors: Callable[[Sample, Captured, str], Content]
    write: Callable[[Path, Content], FileFacts]


FORMATS = {
    "specforge": Format("hidden_states", "bfloat16", ckpt_path, dflash, write_torch),
    "specforge_eagle3": Format("aux_hidden_state", "bfloat16", ckpt_path, eagle3, write_torch),
    "speculators": Format("hidden_states", "bfloat16", hs_path, plain, write_safetensors),
    "speculators_fp8": Format("hidden_states", "float8_e4m3fn", hs_path, fp8, write_safetensors),
    "modelopt": Format("aux_hidden_states", "bfloat16", pt_path, conversation, write_torch),
}
