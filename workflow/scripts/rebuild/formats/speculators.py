"""speculators' offline files: `hs_<row>.safetensors`, numbered as the rows of the data set beside them.

The reader (hs-connectors 0.9.0, `transfer.py`) takes states [S, D+1, H], the last layer's output before the final norm
last, and `token_ids` that must equal the row's `input_ids`. FP8 is that of its `fp8_utils.py`: a scale for each token
over all its layers, the greatest magnitude divided by e4m3's greatest number.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rebuild.formats.contents import Content, Pieces, needed
from rebuild.formats.needs import PRE_NORM
from rebuild.states.captured import Captured
from rebuild.states.judgement import SERIAL_VALUES
from rebuild.states.samples import Sample

DATASET = "speculators"  # folder in the shard's, the trainer's data path
STATES = "hidden_states"  # folder in that one, where the trainer looks unless told otherwise
GREATEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1e-12  # that of a token whose states are all zero
PIECE_VALUES = 1 << 21  # values that are written at a time


def hs_name(row: int) -> str:
    """Return the name of the file of a data set's row."""
    return f"hs_{row}.safetensors"


def hs_path(sample_id: str, row: int) -> str:
    """Return the file's path in the shard's folder: the row's."""
    return f"{DATASET}/{STATES}/{hs_name(row)}"


def layer_ids(layers: Sequence[int]) -> list[int]:
    """Return layers as speculators and vLLM count them: there id k is the input of the 0-based decoder layer k.

    Source: `DFlashConverter` of speculators 0.9.0 (`convert/dflash/converter.py`), which adds 1 to z-lab's ids.
    """
    return [layer + 1 for layer in layers]


def plain(sample: Sample, captured: Captured, include_last: str) -> Content:
    """Return `token_ids` int64 [S] and `hidden_states` bfloat16 [S, D+1, H]."""
    layers = stack(captured)
    return token_ids(sample) | {"hidden_states": in_pieces(layers, torch.bfloat16, None)}


def fp8(sample: Sample, captured: Captured, include_last: str) -> Content:
    """Return `token_ids` int64 [S], `hidden_states_scales` float32 [S, 1, 1], `hidden_states` float8_e4m3fn [S, D+1, H]."""
    layers = stack(captured)
    scales = fp8_scales(layers)
    return token_ids(sample) | {
        "hidden_states_scales": scales.reshape(-1, 1, 1),
        "hidden_states": in_pieces(layers, torch.float8_e4m3fn, scales),
    }


def stack(captured: Captured) -> list[Tensor]:
    """Return the states [S, H] of every layer, the last layer's output before the final norm as the last of them."""
    return [*captured.taps.unbind(1), needed(captured.pre_norm, PRE_NORM)]


def in_pieces(layers: Sequence[Tensor], dtype: torch.dtype, scales: Tensor | None) -> Pieces:
    """Return the layers' states side by side, [S, D+1, H], as `dtype`, divided by their token's scale if there are any."""
    tokens, hidden_size = layers[0].shape

    def make() -> Iterator[Tensor]:
        for rows in blocks(tokens, PIECE_VALUES // (len(layers) * hidden_size)):
            yield convert(
                [layer[rows] for layer in layers], dtype, None if scales is None else scales[rows]
            )

    return Pieces(dtype, (tokens, len(layers), hidden_size), make)


def convert(layers: Sequence[Tensor], dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Return what `in_pieces` promises for some of the tokens."""
    tokens, hidden_size = layers[0].shape
    piece = torch.empty((tokens, len(layers), hidden_size), dtype=dtype)
    for rows in blocks(tokens, SERIAL_VALUES // hidden_size):
        for place, layer in enumerate(layers):
            values = layer[rows]
            piece[rows, place] = values if scales is None else values.float().div_(scales[rows])
    return piece


def fp8_scales(layers: Sequence[Tensor]) -> Tensor:
    """Return what each token's values are divided by for the greatest of them to become `GREATEST`, float32 [S, 1]."""
    tokens, hidden_size = layers[0].shape
    peaks = torch.empty((tokens, 1), dtype=layers[0].dtype)
    for rows in blocks(tokens, SERIAL_VALUES // hidden_size):
        of_layers = [layer[rows].abs().amax(dim=1, keepdim=True) for layer in layers]
        peaks[rows] = torch.cat(of_layers, dim=1).amax(dim=1, keepdim=True)
    return (peaks.float() / GREATEST).clamp(min=SMALLEST_SCALE)


def token_ids(sample: Sample) -> Content:
    """Return the sample's ids under the name that the reader expects."""
    return {"token_ids": torch.from_numpy(sample.input_ids.astype("int64"))}


def blocks(tokens: int, rows: int) -> Iterator[slice]:
    """Yield all tokens in blocks of `rows`, of one at least."""
    rows = max(1, rows)
    for start in range(0, tokens, rows):
        yield slice(start, start + rows)
