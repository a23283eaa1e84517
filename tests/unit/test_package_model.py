"""A converted GGUF is the same model: its weights, its way to cut text, its template and its limits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rebuild.errors import StepError
from rebuild.files import read_json
from rebuild.model.package import convert_gguf
from tests.support.gguf_package import CONTEXT, TEMPLATE, write_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny quantized model."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def converted(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it is converted to."""
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(gguf, folder, "float32")
    return folder


def test_every_weight_is_exactly_the_dequantized_one(gguf: Path, converted: Path) -> None:
    weights = load_file(converted / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    for ours, theirs in {
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        tensor = tensors[theirs]
        assert np.array_equal(weights[ours], dequantize(tensor.data, tensor.tensor_type)), ours


def test_query_rows_are_put_back_into_the_order_that_transformers_rotates(
    gguf: Path, converted: Path
) -> None:
    tensor = next(t for t in GGUFReader(gguf).tensors if t.name == "blk.0.attn_q.weight")
    interleaved = dequantize(tensor.data, tensor.tensor_type).reshape(4, 8, 2, 64)
    halves = interleaved.swapaxes(1, 2).reshape(64, 64)
    ours = load_file(converted / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(ours, halves)


def test_digits_are_cut_one_by_one_though_a_merge_would_join_them(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("hell 1212") == ["hell", "Ġ", "1", "2", "1", "2"]


def test_any_text_comes_back_and_special_tokens_stay_whole(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = "Grüße, 世界 🙂\n\n<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[-1] == 2


def test_template_end_token_and_context_are_the_files_own(converted: Path) -> None:
    assert (converted / "chat_template.jinja").read_text() == TEMPLATE
    assert read_json(converted / "generation_config.json")["eos_token_id"] == 2
    assert read_json(converted / "config.json")["max_position_embeddings"] == CONTEXT
    assert read_json(converted / "tokenizer_config.json")["model_max_length"] == CONTEXT


def test_the_same_file_is_converted_to_the_same_bytes(
    gguf: Path, converted: Path, tmp_path: Path
) -> None:
    convert_gguf(gguf, tmp_path, "float32")
    names = sorted(path.name for path in converted.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (converted / name).read_bytes(), name


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"pre": "qwen2"}, "pre-tokenizer qwen2, chat template: True"),
        ({"template": None}, "pre-tokenizer smollm, chat template: False"),
    ],
)
def test_what_cannot_be_converted_faithfully_is_refused(
    tmp_path: Path, fields: dict[str, Any], seen: str
) -> None:
    write_gguf(tmp_path / "model.gguf", **fields)
    with pytest.raises(StepError, match=f"seen: {seen}"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out", "float32")


def test_the_demo_model_is_the_real_one(demo_model: Path) -> None:
    config = read_json(demo_model / "config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "eos_token_id": 2,
        "rms_norm_eps": pytest.approx(1e-5),
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"]["rope_theta"] == 100000.0


def test_the_demo_model_answers_sensibly(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer[prompt["input_ids"].shape[1] :])


def test_the_demo_tokenizer_cuts_digits_one_by_one(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert tokenizer.tokenize("year 2024") == ["year", "Ġ", "2", "0", "2", "4"]
