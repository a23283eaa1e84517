"""The set of samples that this project was made to stop: most answers are an empty thought and "OK.".

Real tokens of a real tokenizer, in every format that `audit_dataset` reads.
"""

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebuild.tables import TOKENIZED, TableWriter

EMPTY_ANSWER = "<think>\n\n</think>\n\nOK.<|im_end|>"
SHARE = 0.87
FORMATS = ("tokenized", "parquet", "saved", "jsonl", "jsonl.gz", "ckpt", "pt")
SHARDS = 2

TOPICS = [
    *("tides", "glass", "rust", "bread", "queues", "maps", "bridges", "clocks", "lenses", "salt"),
    *("wool", "sails", "canals", "paper", "seeds", "echoes", "magnets", "ink", "bees", "frost"),
]
READERS = ["a child", "a cook", "a sailor", "an engineer", "a painter", "a new colleague"]
QUESTIONS = [
    "Explain {topic} to {reader}.",
    "What should {reader} know about {topic}?",
    "Write {reader} a short note on {topic}.",
    "Which three facts about {topic} surprise {reader} most?",
]
THOUGHTS = [
    "The question is about {topic}, and it comes from {reader}.",
    "I should start with what {reader} has seen of {topic} before.",
    "Numbers help only if they are few; perhaps {number} is enough.",
    "A comparison with {other} would make {topic} clearer.",
    "It must stay short, so I leave out {other}.",
]
SENTENCES = [
    "Think of {topic} as something that changes slowly, over about {number} days.",
    "People have worked with {topic} for some {number} centuries.",
    "Where {topic} and {other} meet, small differences become visible.",
    "The usual mistake is to confuse {topic} with {other}.",
    "If you have {number} minutes, try it yourself with {other} and a cup of water.",
    "Most of what {reader} needs is patience, light and a dry place.",
    "In {number} of a hundred cases the cause is heat, and otherwise it is time.",
    "Books on {other} often have the better pictures of {topic}.",
    "Measure twice: once at {number} degrees, and once a little above.",
    "Nothing about {topic} is secret; it is only seldom written down.",
]


@dataclass(frozen=True)
class Sample:
    """One tokenized answer; `empty` tells whether it is one of the worthless ones."""

    sample_id: str
    source: str
    input_ids: list[int]
    loss_mask: list[int]
    text: str
    empty: bool

    @property
    def prompt_id(self) -> str:
        return self.sample_id.removesuffix("_gen0")


def build_samples(
    tokenizer: Any, rows: int = 100, share: float = SHARE, seed: int = 0
) -> list[Sample]:
    """Return `rows` samples of distinct prompts, of which `share` (rounded to a row) have an empty answer."""
    chance = random.Random(seed)
    empty = [number < round(rows * share) for number in range(rows)]
    chance.shuffle(empty)
    return [_sample(tokenizer, number, flag, chance) for number, flag in enumerate(empty)]


def write_dataset(folder: Path, kind: str, samples: Sequence[Sample]) -> Path:
    """Write the samples in one of FORMATS below `folder`; return the path to audit."""
    writers = {
        "tokenized": _write_tokenized,
        "parquet": _write_parquet,
        "saved": _write_saved,
        "jsonl": _write_jsonl,
        "jsonl.gz": _write_jsonl,
        "ckpt": _write_torch,
        "pt": _write_torch,
    }
    folder.mkdir(parents=True, exist_ok=True)
    return writers[kind](folder, kind, samples)


def _sample(tokenizer: Any, number: int, empty: bool, chance: random.Random) -> Sample:
    words = {
        "topic": TOPICS[number % len(TOPICS)],
        "other": chance.choice(TOPICS),
        "reader": chance.choice(READERS),
    }
    question = f"{chance.choice(QUESTIONS).format(**words)} (No. {number + 1})"
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    answer = EMPTY_ANSWER if empty else _real_answer(words, chance)
    asked, answered = (
        tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer)
    )
    return Sample(
        sample_id=f"p{number:06d}_gen0",
        source=("letters", "talks")[number % 2],
        input_ids=asked + answered,
        loss_mask=[0] * len(asked) + [1] * len(answered),
        text=prompt + answer,
        empty=empty,
    )


def _real_answer(words: dict[str, str], chance: random.Random) -> str:
    def some(choices: list[str], least: int) -> list[str]:
        picked = chance.sample(choices, chance.randint(least, len(choices)))
        return [one.format(**words, number=chance.randint(3, 97)) for one in picked]

    thought, said = " ".join(some(THOUGHTS, 2)), " ".join(some(SENTENCES, 3))
    return f"<think>\n{thought}\n</think>\n\n{said}<|im_end|>"


def _shards(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Return the samples as shards, in order."""
    size = -(-len(samples) // SHARDS)
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    return {
        "input_ids": [sample.input_ids for sample in samples],
        "loss_mask": [sample.loss_mask for sample in samples],
    }


def _write_tokenized(folder: Path, kind: str, samples: Sequence[Sample]) -> Path:
    for number, shard in enumerate(_shards(samples)):
        with TableWriter(folder / f"{number:05d}.parquet", TOKENIZED, {}) as table:
            table.write([_tokenized_row(sample) for sample in shard])
    return folder


def _tokenized_row(sample: Sample) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "prompt_id": sample.prompt_id,
        "turn": 0,
        "source": sample.source,
        "input_ids": sample.input_ids,
        "loss_mask": sample.loss_mask,
        "seq_len": len(sample.input_ids),
        "loss_tokens": sum(sample.loss_mask),
        "mask_origin": "engine",
        "finish_reason": "stop",
    }


def _write_parquet(folder: Path, kind: str, samples: Sequence[Sample]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number, shard in enumerate(_shards(samples)):
        pq.write_table(
            pa.table(_columns(shard)), folder / f"train-{number:05d}-of-{SHARDS:05d}.parquet"
        )
    return folder


def _write_saved(folder: Path, kind: str, samples: Sequence[Sample]) -> Path:
    from datasets import Dataset

    lengths = [len(sample.input_ids) for sample in samples]
    data = Dataset.from_dict(_columns(samples) | {"seq_len": lengths})
    data.save_to_disk(folder / "saved", num_shards=SHARDS)
    return folder / "saved"


def _write_jsonl(folder: Path, kind: str, samples: Sequence[Sample]) -> Path:
    """Write rows as speculators does."""
    file = folder / f"samples.{kind}"
    rows = [
        {
            "id": sample.sample_id,
            "primary_id": sample.prompt_id,
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "text": sample.text,
            "metadata": {"idx": number, "finish_reason": "stop"},
        }
        for number, sample in enumerate(samples)
    ]
    with gzip.open(file, "wt") if kind.endswith(".gz") else open(file, "w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return file


def _write_torch(folder: Path, kind: str, samples: Sequence[Sample]) -> Path:
    """Write files as SpecForge's offline reader (*.ckpt) or ModelOpt's (*.pt) takes them, with two-wide states."""
    import torch

    from tests.support.captured import write_specforge

    for sample in samples:
        file = folder / f"{sample.sample_id}.{kind}"
        if kind == "ckpt":
            write_specforge(file, sample.input_ids, sample.loss_mask)
        else:
            states = torch.ones(len(sample.input_ids), 2).bfloat16()
            tensors = {"input_ids": torch.tensor(sample.input_ids), "hidden_states": states}
            tensors["loss_mask"] = torch.tensor(sample.loss_mask)
            torch.save(tensors | {"conversation_id": sample.prompt_id}, file)
    return folder
