"""Samples and their states, made up: what formats write, without a model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rebuild.formats.catalog import FORMATS
from rebuild.states.captured import Captured
from rebuild.states.samples import Sample
from rebuild.tables import HIDDEN_STATES, TableWriter

LAYERS = 3
HIDDEN = 16


def make_sample(sample_id: str = "one_gen0", length: int = 7) -> Sample:
    """Return a sample of random ids, its first third the prompt."""
    ids = np.random.default_rng(length).integers(0, 1000, length)
    mask = np.arange(length) >= length // 3
    return Sample(sample_id, ids.astype(np.int32), mask.astype(np.int8))


def make_captured(
    length: int = 7, layers: int = LAYERS, hidden: int = HIDDEN, seed: int = 0
) -> Captured:
    """Return random states of a sample of this length, both final ones among them; no two values of a token alike."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(layers + 2, length, hidden, generator=generator).bfloat16()
    taps = states[:layers].transpose(0, 1).contiguous()
    return Captured(taps, states[layers].clone(), states[layers + 1].clone())


def write_specforge(path: Path, input_ids: Sequence[int], loss_mask: Sequence[int]) -> None:
    """Write a sample as SpecForge's offline reader takes it, with two-wide states of one layer, all ones."""
    sample = Sample(path.stem, np.array(input_ids, np.int32), np.array(loss_mask, np.int8))
    captured = Captured(torch.ones(len(sample), 1, 2).bfloat16())
    kind = FORMATS["specforge"]
    kind.write(path, kind.tensors(sample, captured, "none"))


def write_empty_index(path: Path) -> Path:
    """Write the index of a shard, without rows, and return its path."""
    with TableWriter(path, HIDDEN_STATES, {}):
        return path
