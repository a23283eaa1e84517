"""A GGUF file turned into what servers and transformers read: safetensors, tokenizer and chat template.

transformers reads GGUF itself; what it gets wrong on the way is put right here, and what cannot be vouched for is
refused rather than converted wrongly.
"""

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from rebuild.step import say

# By `tokenizer.ggml.pre`: how text is cut before byte-pair merging. GGUF keeps only this name, and transformers falls
# back to a plain ByteLevel, which for SmolLM would merge digits (llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM).
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
        ],
    }
}


def convert_gguf(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the model in `gguf` to `folder`, dequantized to `dtype` ("float32" keeps every weight exact).

    Raises:
        StepError: the file's pre-tokenizer is not one that converts faithfully, or it has no chat template.
    """
    fields = GGUFReader(gguf).fields
    facts = {key: fields[key].contents() for key in fields if not is_vocabulary(key)}
    check_convertible(gguf, facts)
    say(f"converting {gguf.name} to {dtype} safetensors")
    logging.disable_progress_bar()
    write_tokenizer(gguf, folder, facts)
    write_weights(gguf, folder, dtype, facts)


def is_vocabulary(key: str) -> bool:
    """Return whether a GGUF field is one of the long lists of the vocabulary."""
    return key.startswith("tokenizer.ggml.") and key.split(".")[-1] in {
        "tokens",
        "token_type",
        "merges",
        "scores",
    }


def check_convertible(gguf: Path, facts: dict[str, Any]) -> None:
    """Raise StepError unless tokenizer and chat template come out of this file as they should."""
    pre = facts.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS or not facts.get("tokenizer.chat_template"):
        raise StepError(
            "this GGUF file cannot be converted faithfully",
            where=str(gguf),
            expected=f"a chat template, and a pre-tokenizer out of {', '.join(PRE_TOKENIZERS)}",
            seen=f"pre-tokenizer {pre}, chat template: {'tokenizer.chat_template' in facts}",
            remedy="use the model's safetensors release: model.source as a folder or hub:<repo>@<revision>",
        )


def context_length(facts: dict[str, Any]) -> int:
    """Return how many tokens the model was made for, by the GGUF's own metadata."""
    return int(facts[f"{facts['general.architecture']}.context_length"])


def write_tokenizer(gguf: Path, folder: Path, facts: dict[str, Any]) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = context_length(facts)
    tokenizer.save_pretrained(folder)
    rules = read_json(folder / "tokenizer.json")
    rules["pre_tokenizer"] = PRE_TOKENIZERS[facts["tokenizer.ggml.pre"]]
    write_json(folder / "tokenizer.json", rules)
    config = read_json(folder / "tokenizer_config.json")
    for key in ("is_local", "local_files_only"):  # how it was loaded here is no part of the model
        config.pop(key, None)
    write_json(folder / "tokenizer_config.json", config)


def write_weights(gguf: Path, folder: Path, dtype: str, facts: dict[str, Any]) -> None:
    """Write the weights, config.json and generation_config.json."""
    with redirect_stderr(StringIO()):  # a progress bar that cannot be turned off
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),  # what stays quantized cannot be saved
        )
    model.config.architectures = [type(model).__name__]
    model.config.max_position_embeddings = context_length(facts)
    model.generation_config.eos_token_id = int(facts["tokenizer.ggml.eos_token_id"])
    model.save_pretrained(folder)
