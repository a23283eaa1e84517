"""SpecForge's offline files: for DFlash and DSpark, and for EAGLE-3.

The reader (SpecForge 0.2.0, `specforge/runtime/data_plane/offline_reader.py`) takes every `*.ckpt` below a folder,
whatever its name, and cuts ids and masks as vectors; `algorithms/common/dflash_family_data.py` takes states with or
without a batch axis of 1, `algorithms/eagle3/data.py` counts on it.
"""

from rebuild.formats.contents import Content, ids_and_mask, needed, side_by_side
from rebuild.formats.names import file_name
from rebuild.formats.needs import POST_NORM
from rebuild.states.captured import Captured
from rebuild.states.samples import Sample


def ckpt_path(sample_id: str, row: int) -> str:
    """Return the file's path in the shard's folder: the id's."""
    return file_name(sample_id, ".ckpt")


def dflash(sample: Sample, captured: Captured, include_last: str) -> Content:
    """Return ids and mask [S], `hidden_states` [S, D·H], and for DSpark `target_last_hidden_states` [1, S, H], normed."""
    content = ids_and_mask(sample) | {"hidden_states": side_by_side(captured.taps)}
    if include_last == POST_NORM:
        final = needed(captured.post_norm, POST_NORM)
        content["target_last_hidden_states"] = final.unsqueeze(0)
    return content


def eagle3(sample: Sample, captured: Captured, include_last: str) -> Content:
    """Return ids and mask [S], `hidden_state` [1, S, H] after the final norm, and `aux_hidden_state` [1, S, 3·H]."""
    return ids_and_mask(sample) | {
        "hidden_state": needed(captured.post_norm, POST_NORM).unsqueeze(0),
        "aux_hidden_state": side_by_side(captured.taps).unsqueeze(0),
    }
