"""What the manifest says of a model, and how a phase comes to the folder that holds exactly that model."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from rebuild.model.manifest import describe_config, ensure_model, is_hybrid, load_manifest
from stage_model import stage_model
from tests.support.gguf_package import write_package

# The shape of the published configuration of Qwen3.6-27B, a multimodal model: the sizes are nested.
QWEN36_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "vision_config": {"hidden_size": 1152, "depth": 27},
    "text_config": {
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "hidden_size": 5120,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "max_position_embeddings": 262144,
        "num_hidden_layers": 64,
        "vocab_size": 248320,
    },
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
    "eos_token_id": 7,
}


def stage(source: str, folder: Path, stage_to: Path | None = None) -> Path:
    """Stage a model and return its manifest."""
    manifest = folder / "manifest.json"
    stage_model(
        source,
        manifest,
        revision=None,
        stage_to=stage_to,
        models_dir=folder / "models",
        trust_remote_code=False,
        layers=None,
        generated=folder / "generated",
        fingerprint="f",
    )
    return manifest


def with_configs(folder: Path, config: dict[str, Any], generation: Any = None) -> Path:
    """Write config.json, and generation_config.json if given."""
    write_json(folder / "config.json", config)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    return folder


def test_sizes_of_a_multimodal_model_come_from_its_text_model(tmp_path: Path) -> None:
    facts = describe_config(with_configs(tmp_path, QWEN36_27B), None)
    assert facts == {
        "architecture": "Qwen3_5ForConditionalGeneration",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "vocab_size": 248320,
        "context_length": 262144,
        "dtype": "bfloat16",
        "hybrid": True,
        "eos_token_ids": [248044],
    }


def test_a_plain_model_is_described_by_its_own_config(tmp_path: Path) -> None:
    facts = describe_config(with_configs(tmp_path, LLAMA), None)
    assert (facts["num_hidden_layers"], facts["hidden_size"], facts["dtype"]) == (2, 8, "float16")
    assert not facts["hybrid"]


@pytest.mark.parametrize(
    ("generation", "config_eos", "tokenizer_eos", "expected"),
    [
        ({"eos_token_id": [5, 3]}, 7, 9, [3, 5]),
        ({"eos_token_id": 4}, 7, 9, [4]),
        ({"temperature": 1}, [8, 7], 9, [7, 8]),
        (None, 7, 9, [7]),
        (None, None, 9, [9]),
        (None, None, 0, [0]),
    ],
)
def test_end_tokens_are_the_generation_configs_else_the_configs_else_the_tokenizers(
    tmp_path: Path, generation: Any, config_eos: Any, tokenizer_eos: int, expected: list[int]
) -> None:
    folder = with_configs(tmp_path, LLAMA | {"eos_token_id": config_eos}, generation)
    assert describe_config(folder, tokenizer_eos)["eos_token_ids"] == expected


def test_a_model_without_any_end_token_is_refused(tmp_path: Path) -> None:
    folder = with_configs(tmp_path, LLAMA | {"eos_token_id": None})
    with pytest.raises(StepError, match="which token ends an answer"):
        describe_config(folder, None)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "architectures"])
def test_a_config_without_a_size_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(StepError, match=rf"incomplete(.|\n)*lacking {key}"):
        describe_config(with_configs(tmp_path, config), None)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"full_attention_interval": 4}, True),
        ({"full_attention_interval": 1}, False),
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"hybrid_override_pattern": "M-M*"}, True),
        ({"linear_attn_config": {"head_dim": 128}}, True),
        ({}, False),
    ],
)
def test_a_model_is_hybrid_when_some_of_its_layers_keep_a_state(
    config: dict[str, Any], expected: bool
) -> None:
    assert is_hybrid(config) is expected


def test_the_tiny_qwen36_is_recognised_as_hybrid(tiny_qwen36: Path) -> None:
    facts = describe_config(tiny_qwen36, None)
    assert (facts["hybrid"], facts["eos_token_ids"]) == (True, [248044, 248046])


def test_a_missing_manifest_says_how_to_have_it_made(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"cannot read(.|\n)*snakemake"):
        load_manifest(tmp_path / "manifest.json")


def test_a_manifest_of_another_version_or_without_a_key_is_refused(
    tiny_llama: Path, tmp_path: Path
) -> None:
    manifest = stage(str(tiny_llama), tmp_path)
    whole = read_json(manifest)
    write_json(manifest, whole | {"schema_version": "0"})
    with pytest.raises(StepError, match="version 0"):
        load_manifest(manifest)
    write_json(manifest, {key: value for key, value in whole.items() if key != "hybrid"})
    with pytest.raises(StepError, match="lacking hybrid"):
        load_manifest(manifest)


def test_a_model_that_is_in_place_is_used_in_place(tiny_llama: Path, tmp_path: Path) -> None:
    assert ensure_model(stage(str(tiny_llama), tmp_path)) == tiny_llama


@pytest.mark.parametrize("change", ["cut", "remove"])
def test_a_folder_that_changed_is_not_used(tiny_llama: Path, tmp_path: Path, change: str) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    manifest = stage(str(folder), tmp_path)
    if change == "cut":
        (folder / "tokenizer_config.json").write_text("{}")
    else:
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(StepError, match=r"not the one that this run(.|\n)*tokenizer_config\.json"):
        ensure_model(manifest)


def test_a_staged_copy_that_vanished_is_made_again_from_its_origin(
    tiny_llama: Path, tmp_path: Path
) -> None:
    manifest = stage(str(tiny_llama), tmp_path, stage_to=tmp_path / "shm")
    shutil.rmtree(tmp_path / "shm")
    folder = ensure_model(manifest)
    assert folder.parent == tmp_path / "shm"
    assert (folder / "config.json").read_bytes() == (tiny_llama / "config.json").read_bytes()


def test_a_staged_copy_without_its_origin_still_serves(tiny_llama: Path, tmp_path: Path) -> None:
    origin = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    manifest = stage(str(origin), tmp_path, stage_to=tmp_path / "shm")
    shutil.rmtree(origin)
    assert ensure_model(manifest).parent == tmp_path / "shm"


def test_a_converted_model_that_vanished_with_its_copy_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path / "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    manifest = stage("package:tiny-gguf", tmp_path, stage_to=tmp_path / "shm")
    shutil.rmtree(tmp_path / "shm")
    shutil.rmtree(tmp_path / "models")
    assert (ensure_model(manifest) / "model.safetensors").is_file()


def test_a_model_that_comes_back_with_another_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path / "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    manifest = stage("package:tiny-gguf", tmp_path)
    shutil.rmtree(tmp_path / "models")
    recorded = json.loads(manifest.read_text())
    recorded["files"]["config.json"]["sha256"] = "0" * 64
    write_json(manifest, recorded)
    with pytest.raises(StepError, match=r"not the one that this run(.|\n)*config\.json"):
        ensure_model(manifest)
