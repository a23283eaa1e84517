"""Staging: from the configured source to a folder that is whole, and a manifest that says what it is."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.files import read_json, sha256_file, write_json
from rebuild.model.files import content_sha256
from rebuild.model.manifest import load_manifest
from rebuild.tables import GENERATED, TableWriter
from stage_model import stage_model


def stage(source: Path, folder: Path, **settings: Any) -> Path:
    """Stage a local model with settings of one's own; return the manifest."""
    manifest = folder / "results" / "manifest.json"
    usual: dict[str, Any] = {
        "revision": None,
        "stage_to": None,
        "models_dir": folder / "models",
        "trust_remote_code": False,
        "layers": None,
        "generated": folder / "results" / "generated",
        "fingerprint": "the fingerprint",
    }
    stage_model(str(source), manifest, **usual | settings)
    return manifest


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be broken."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def listing(folder: Path) -> dict[str, int]:
    """Return every file below a folder with its time of change."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_manifest_says_where_the_model_is_and_what_it_is(
    tiny_llama: Path, tmp_path: Path
) -> None:
    manifest = load_manifest(stage(tiny_llama, tmp_path, revision="v3"))
    files = manifest.pop("files")  # type: ignore[misc]
    assert manifest == {
        "schema_version": "1",
        "source": str(tiny_llama),
        "revision": "v3",
        "path": str(tiny_llama),
        "origin": None,
        "content_sha256": content_sha256(files),
        "chat_template_sha256": sha256_file(tiny_llama / "chat_template.jinja"),
        "architecture": "LlamaForCausalLM",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "vocab_size": 49152,
        "context_length": 4096,
        "dtype": "float32",
        "hybrid": False,
        "eos_token_ids": [2],
        "trust_remote_code": False,
        "fingerprint": "the fingerprint",
    }
    assert files["model.safetensors"] == {
        "size": (tiny_llama / "model.safetensors").stat().st_size,
        "sha256": sha256_file(tiny_llama / "model.safetensors"),
    }


def test_a_local_folder_is_never_written_to(model: Path, tmp_path: Path) -> None:
    before = listing(model)
    for path in (*model.iterdir(), model):
        path.chmod(0o555 if path.is_dir() else 0o444)
    stage(model, tmp_path)
    model.chmod(0o755)
    assert listing(model) == before


def test_staging_again_writes_the_same_manifest(tiny_llama: Path, tmp_path: Path) -> None:
    first = stage(tiny_llama, tmp_path).read_bytes()
    assert stage(tiny_llama, tmp_path).read_bytes() == first


def test_the_staged_copy_is_named_by_its_content_and_its_origin_is_kept(
    model: Path, tmp_path: Path
) -> None:
    manifest = load_manifest(stage(model, tmp_path, stage_to=tmp_path / "shm"))
    folder = tmp_path / "shm" / f"model-{manifest['content_sha256'][:12]}"
    assert (manifest["path"], manifest["origin"]) == (str(folder), str(model))
    for name, facts in manifest["files"].items():
        assert sha256_file(folder / name) == facts["sha256"]


def test_two_versions_of_a_model_are_staged_side_by_side(model: Path, tmp_path: Path) -> None:
    old = load_manifest(stage(model, tmp_path, stage_to=tmp_path / "shm"))
    config = read_json(model / "generation_config.json")
    write_json(model / "generation_config.json", config | {"temperature": 0.5})
    new = load_manifest(stage(model, tmp_path, stage_to=tmp_path / "shm"))
    assert old["content_sha256"] != new["content_sha256"]
    assert Path(old["path"]).is_dir()
    assert Path(new["path"]).is_dir()


def test_a_real_qwen36_is_recorded_with_its_layers_and_end_tokens(
    tiny_qwen36: Path, tmp_path: Path
) -> None:
    manifest = load_manifest(stage(tiny_qwen36, tmp_path))
    assert manifest["hybrid"]
    assert manifest["eos_token_ids"] == [248044, 248046]
    assert manifest["vocab_size"] == 248320


def test_a_model_that_cannot_chat_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(StepError, match=r"no chat template(.|\n)*chat_template\.jinja"):
        stage(model, tmp_path)
    assert not (tmp_path / "results").exists()


def test_a_template_inside_the_tokenizer_config_counts(model: Path, tmp_path: Path) -> None:
    text = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    config = read_json(model / "tokenizer_config.json")
    write_json(model / "tokenizer_config.json", config | {"chat_template": text})
    manifest = load_manifest(stage(model, tmp_path))
    assert manifest["chat_template_sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_a_model_without_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(StepError, match="tokenizer cannot be loaded"):
        stage(model, tmp_path)


def test_code_from_the_model_runs_only_when_the_config_trusts_it(
    model: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    (model / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(marker)!r}).touch()\n"
        "class Own(PreTrainedTokenizerFast):\n"
        "    pass\n"
    )
    config = read_json(model / "tokenizer_config.json")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    write_json(model / "tokenizer_config.json", config | own)
    with pytest.raises(StepError, match=r"model\.trust_remote_code: true"):
        stage(model, tmp_path)
    assert not marker.exists()
    manifest = load_manifest(stage(model, tmp_path, trust_remote_code=True))
    assert marker.exists()
    assert "own.py" in manifest["files"]


def test_another_model_than_the_one_that_answered_is_refused(model: Path, tmp_path: Path) -> None:
    answered = tmp_path / "results" / "generated" / "00000.parquet"
    content = load_manifest(stage(model, tmp_path))["content_sha256"]
    for answered_by in (content, "another"):
        with TableWriter(answered, GENERATED, {"model_sha256": answered_by}):
            pass
        if answered_by == content:
            stage(model, tmp_path)
        else:
            with pytest.raises(StepError, match="not the one that answered so far"):
                stage(model, tmp_path)


def test_a_drafter_for_another_target_is_refused_before_anything_is_answered(
    model: Path, tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter.json"
    config = {"num_target_layers": 64, "dflash_config": {"target_layer_ids": [1]}}
    drafter.write_text(json.dumps(config))
    with pytest.raises(StepError, match="the drafter is for another target") as refused:
        stage(model, tmp_path, drafter=str(drafter))
    assert "layers 64" in refused.value.expected


def test_layers_that_the_model_does_not_have_are_refused_before_anything_is_answered(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(StepError, match="500"):
        stage(model, tmp_path, layers=[1, 500])
