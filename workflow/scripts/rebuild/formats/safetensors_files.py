"""Files in the safetensors format, written from the tensors' own memory.

A file is the length of its header (8 bytes, little-endian), the header (JSON: for every tensor its dtype, its shape,
and where its bytes begin and end after the header), and the tensors' bytes without gaps. The library's own writer
takes tensors as a whole and a path, so that the checksum would need another reading.
"""

import json
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rebuild.formats.contents import Content, Pieces
from rebuild.formats.writing import FileFacts, HashedFile, write_file

DTYPES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
ALIGNED = 8  # bytes to which the tensors' beginning is padded, as readers map it into memory


def write_safetensors(path: Path, content: Content) -> FileFacts:
    """Write tensors, whole or not at all, in the order given: larger values first keeps all of them aligned.

    Raises:
        StepError: the disk is full or refuses.
    """
    tensors = cast("dict[str, Tensor | Pieces]", content)

    def fill(file: HashedFile) -> None:
        file.write(header(tensors))
        for tensor in tensors.values():
            for piece in tensor.make() if isinstance(tensor, Pieces) else [tensor]:
                file.write(raw_bytes(piece))

    return write_file(path, fill, sum(tensor.nbytes for tensor in tensors.values()))


def header(tensors: dict[str, Tensor | Pieces]) -> bytes:
    """Return the header with its length before it."""
    entries, end = {}, 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's memory, without a copy if it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
