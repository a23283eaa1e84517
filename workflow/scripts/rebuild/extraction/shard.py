"""A shard on its way to the disk: where its files go, which of them are due, and how one sample becomes its parts."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rebuild.formats.catalog import FORMATS
from rebuild.states.captured import Captured
from rebuild.states.judgement import FINAL, LayerFacts, measure_layer
from rebuild.states.parts import Due, Key, Part, begin_log, read_log, record_parts, whole_parts
from rebuild.states.samples import Sample


@dataclass(frozen=True)
class Shard:
    """One shard's folder and formats, and what besides its tokens its states are made from."""

    name: str
    folder: Path
    layers: tuple[int, ...]
    formats: tuple[str, ...]
    include_last: str
    identity: str

    def due(self, samples: Sequence[Sample]) -> dict[Key, Due]:
        """Return every part that the samples must have in the end."""
        return {
            Key(sample.sample_id, name): Due(
                f"{self.folder.name}/{FORMATS[name].path(sample.sample_id, row)}",
                sample.made_from(self.identity),
            )
            for row, sample in enumerate(samples)
            for name in self.formats
        }

    def finished_parts(self, due: dict[Key, Due]) -> dict[Key, Part]:
        """Return the parts of an earlier attempt that are whole and still due; begin the log with them."""
        parts = whole_parts(read_log(self.folder), due, self.folder.parent)
        begin_log(self.folder, parts.values())
        return parts

    def lacking(self, samples: Sequence[Sample], parts: Container[Key]) -> list[Sample]:
        """Return the samples that lack a part."""
        return [
            sample
            for sample in samples
            if any(Key(sample.sample_id, name) not in parts for name in self.formats)
        ]


def measure(captured: Captured, layers: Sequence[int]) -> list[LayerFacts]:
    """Return the facts of every wanted layer, and of the final states that were captured, as FINAL."""
    facts = [measure_layer(captured.taps[:, place], layer) for place, layer in enumerate(layers)]
    final = [state for state in (captured.pre_norm, captured.post_norm) if state is not None]
    return facts + [measure_layer(state, FINAL) for state in final]


def write_sample(
    shard: Shard,
    sample: Sample,
    captured: Captured,
    facts: Sequence[LayerFacts],
    due: dict[Key, Due],
    logprob: float | None,
) -> list[Part]:
    """Write one sample's files, record them as finished, and return the parts: index rows and `made_from`."""
    layers = [fact for fact in facts if fact.layer != FINAL]
    final = next((fact.rms for fact in facts if fact.layer == FINAL), None)
    parts = []
    with torch.inference_mode():
        for name in shard.formats:
            kind, wanted = FORMATS[name], due[Key(sample.sample_id, name)]
            tensors = kind.tensors(sample, captured, shard.include_last)
            written = kind.write(shard.folder.parent / wanted.file, tensors)
            parts.append(
                {
                    "sample_id": sample.sample_id,
                    "file": wanted.file,
                    "key": kind.key,
                    "seq_len": len(sample),
                    "layers": list(shard.layers),
                    "dtype": kind.dtype,
                    "bytes": written.bytes,
                    "sha256": written.sha256,
                    "rms": [fact.rms for fact in layers],
                    "finite": True,
                    "zero_rows": 0,
                    "format": name,
                    "token_rms": [fact.token_rms for fact in layers],
                    "final_rms": final,
                    "logprob": logprob,
                    "made_from": wanted.made_from,
                }
            )
    record_parts(shard.folder, parts)
    return parts
