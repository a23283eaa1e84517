"""A Python package that carries a tiny random Llama as GGUF, as far as importing its metadata can tell."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from tests.support.qwen36 import byte_letters

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED, CONTEXT = 64, 4, 2, 2, 128, 512
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "1 2", "Ġ 1"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_package(
    site: Path, name: str = "tiny-gguf", files: tuple[str, ...] = ("model.gguf",), **fields: Any
) -> None:
    """Lay the package `name` 1.0 into the folder `site`, with the tiny model under each of the file names."""
    folder = site / name.replace("-", "_")
    folder.mkdir(parents=True)
    for file in files:
        write_gguf(folder / file, **fields)
    facts = site / f"{folder.name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    listed = [f"{folder.name}/{file},," for file in ("__init__.py", *files)]
    (facts / "RECORD").write_text("\n".join(listed) + "\n")


def write_gguf(path: Path, pre: str = "smollm", template: str | None = TEMPLATE) -> None:
    """Write a quantized Llama of two layers and a vocabulary of bytes, five merges and three special tokens."""
    writer = GGUFWriter(path, "llama")
    tokens = [*SPECIALS, *byte_letters().values(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    control = len(SPECIALS)
    writer.add_token_types(
        [TokenType.CONTROL] * control + [TokenType.NORMAL] * (len(tokens) - control)
    )
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    for name, shape in tensor_shapes(len(tokens)).items():
        add_random_tensor(writer, name, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a Llama's tensors in GGUF."""
    kv = HIDDEN * KV_HEADS // HEADS
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FEED, HIDDEN),
        "ffn_up": (FEED, HIDDEN),
        "ffn_down": (HIDDEN, FEED),
    }
    shapes = {f"blk.{n}.{key}.weight": shape for n in range(LAYERS) for key, shape in layer.items()}
    return shapes | {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}


def add_random_tensor(writer: GGUFWriter, name: str, shape: tuple[int, ...]) -> None:
    """Add one tensor: matrices as Q4_1, vectors as they are."""
    values = np.random.default_rng(len(name)).normal(0, 0.2, shape).astype(np.float32)
    if len(shape) == 1:
        writer.add_tensor(name, values)
        return
    kind = GGMLQuantizationType.Q4_1
    writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
