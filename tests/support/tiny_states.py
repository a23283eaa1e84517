"""Small inputs for extraction: random models without a tokenizer, their manifests, and tokenized shards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from extract_hidden_states import Around
from rebuild.files import read_json, sha256_file, sha256_json, write_json
from rebuild.start.config import complete_config, load_schema
from rebuild.tables import TOKENIZED, TableWriter
from tests.support.trees import ROOT

# Where the cores are busy, threads that wait for one another make these tiny products a hundred times slower.
torch.set_num_threads(1)

VOCABULARY = 512
LAYERS = 8
HIDDEN = 64

PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
HYBRID = {
    **PLAIN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3
    + ["full_attention"]
    + ["linear_attention"] * 3
    + ["full_attention"],
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}


def build_model(kind: str):
    """Return a random float32 model: llama, qwen3, hybrid (Qwen3.5/3.6) or hybrid_with_vision (as published)."""
    torch.manual_seed(0)
    match kind:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**PLAIN))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**PLAIN))
        case "hybrid":
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID))
        case "hybrid_with_vision":
            config = Qwen3_5Config(text_config=HYBRID, vision_config=VISION)
            model = Qwen3_5ForConditionalGeneration(config)
        case _:
            raise ValueError(kind)
    return model.eval()


def save_model(kind: str, folder: Path) -> Path:
    """Save such a model and return its folder."""
    build_model(kind).save_pretrained(folder)
    return folder


def make_ids(length: int, seed: int) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def tokenized_row(sample_id: str, length: int) -> dict:
    """Return a row of a tokenized shard: the first third prompt, the rest answer."""
    prompt = length // 3
    return {
        "sample_id": sample_id,
        "prompt_id": sample_id.rpartition("_gen")[0] or sample_id,
        "turn": 0,
        "source": "test",
        "input_ids": make_ids(length, seed=length),
        "loss_mask": [0] * prompt + [1] * (length - prompt),
        "seq_len": length,
        "loss_tokens": length - prompt,
        "mask_origin": "engine",
        "finish_reason": "stop",
    }


def write_tokenized(path: Path, rows: list[dict[str, Any]], **facts: str) -> Path:
    """Write a tokenized shard and return its path."""
    with TableWriter(path, TOKENIZED, {"fingerprint": "tokens", **facts}) as writer:
        writer.write(rows)
    return path


def write_manifest(path: Path, model: Path, **changes: Any) -> Path:
    """Write the manifest of such a model and return its path."""
    config = read_json(model / "config.json")
    text = config.get("text_config", config)
    files = {file.name: file for file in sorted(model.iterdir())}
    facts = {
        name: {"size": file.stat().st_size, "sha256": sha256_file(file)}
        for name, file in files.items()
    }
    manifest = {
        "schema_version": "1",
        "source": str(model),
        "revision": None,
        "path": str(model),
        "origin": None,
        "files": facts,
        "content_sha256": sha256_json(facts),
        "chat_template_sha256": "",
        "architecture": config["architectures"][0],
        "num_hidden_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "context_length": text["max_position_embeddings"],
        "dtype": "float32",
        "hybrid": "linear_attention" in text.get("layer_types", []),
        "eos_token_ids": [2],
        "trust_remote_code": False,
        "fingerprint": "model",
    }
    write_json(path, {**manifest, **changes})
    return path


@dataclass(frozen=True)
class ExtractionRun:
    """A run's folder with a staged model, and one of its shards."""

    folder: Path
    manifest: Path
    shard: str = "00000"

    @property
    def tokenized(self) -> Path:
        return self.folder / "tokenized" / f"{self.shard}.parquet"

    @property
    def states(self) -> Path:
        return self.folder / "hidden_states" / self.shard

    @property
    def index(self) -> Path:
        return self.folder / "hidden_states" / f"{self.shard}.parquet"

    def approve(self) -> Path:
        """Write the audit's approval of the samples as they are now, and return its path."""
        path = self.folder / "audit" / f"{self.shard}.approved"
        write_json(path, {"tokenized_sha256": sha256_file(self.tokenized)})
        return path

    def arguments(self, *, fingerprint: str = "states", **settings: Any) -> dict[str, Any]:
        """Return the arguments of `extract_hidden_states` for the shard, approved, on the CPU, with changed settings."""
        config = complete_config({}, load_schema(ROOT / "workflow/schemas/config.schema.yaml"))
        return {
            "tokenized": self.tokenized,
            "approved": self.approve(),
            "model_manifest": self.manifest,
            "index": self.index,
            "folder": self.states,
            "run": self.folder,
            "settings": config["hidden_states"] | {"layers": [1, 3, 4]} | settings,
            "around": Around(
                server=config["server"],
                sampling=config["sampling"],
                devices=["cpu"],
                gpus_granted=1,
                server_logs=self.folder / "logs" / "server" / f"{self.shard}-states",
                stand_in=ROOT / "envs" / "cpu" / "stand_in",
                scratch=self.folder / ".partial" / "hidden_states" / self.shard,
            ),
            "fingerprint": fingerprint,
        }
