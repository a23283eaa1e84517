"""Which files make up a model, and what is refused as not whole."""

import json
import shutil
from pathlib import Path

import pytest

from rebuild.errors import StepError
from rebuild.model.files import (
    INDEX,
    changed_files,
    check_folder,
    content_sha256,
    deviations,
    hash_files,
)


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be broken."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_weights_tokenizer_template_and_configs_make_up_the_model(model: Path) -> None:
    assert check_folder(model) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_readme_hidden_files_and_pickles_beside_safetensors_are_no_part_of_the_model(
    model: Path,
) -> None:
    before = check_folder(model)
    for name in ("README.md", ".gitattributes", ".cache.json", "pytorch_model.bin", "a.pt"):
        (model / name).write_text("{}")
    (model / "pytorch_model.bin.index.json").write_text("{}")
    assert check_folder(model) == before


def test_model_code_and_named_templates_are_part_of_the_model(model: Path) -> None:
    (model / "chat_templates").mkdir()
    (model / "chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (model / "modeling_own.py").write_text("")
    assert {"modeling_own.py", "chat_templates/tool_use.jinja"} <= set(check_folder(model))


def test_a_folder_without_config_is_refused_with_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(StepError, match=r"holds no model(.|\n)*seen: notes\.txt"):
        check_folder(tmp_path)


def test_pickled_weights_alone_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(StepError, match=r"no pickle is ever read(.|\n)*pytorch_model\.bin"):
        check_folder(model)


def test_a_model_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(StepError, match="no weights"):
        check_folder(model)


def test_of_several_weight_files_those_count_that_the_index_names(model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    names = check_folder(model)
    assert "model.safetensors" in names
    assert INDEX in names
    assert "consolidated.safetensors" not in names


def test_a_weight_file_that_the_index_names_and_that_is_not_there_is_named(model: Path) -> None:
    weights = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / INDEX).write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(StepError, match=r"1 missing: model-00002-of-00002\.safetensors"):
        check_folder(model)


@pytest.mark.parametrize("cut", [1, 4096])
def test_weights_cut_short_are_refused_with_the_length_they_should_have(
    model: Path, cut: int
) -> None:
    path = model / "model.safetensors"
    size = path.stat().st_size
    with open(path, "r+b") as handle:
        handle.truncate(size - cut)
    with pytest.raises(StepError, match=rf"expected: {size} bytes(.|\n)*seen: {size - cut} bytes"):
        check_folder(model)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", b"\xff" * 9]
)
def test_what_is_no_safetensors_file_is_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(StepError, match=r"not whole(.|\n)*Git LFS"):
        check_folder(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_json_file_cut_short_is_named(model: Path, name: str) -> None:
    text = (model / name).read_text()
    (model / name).write_text(text[: len(text) // 2])
    with pytest.raises(StepError, match=rf"not whole(.|\n)*{name}"):
        check_folder(model)


def test_hashes_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"")
    assert hash_files(tmp_path, ["a", "b"]) == {
        "a": {
            "size": 3,
            "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        },
        "b": {
            "size": 0,
            "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        },
    }


def test_the_content_hash_depends_on_names_and_bytes_and_on_nothing_else(tmp_path: Path) -> None:
    for folder, order in (("one", "ab"), ("two", "ba")):
        (tmp_path / folder).mkdir()
        for name in order:
            (tmp_path / folder / name).write_text(name)
    one, two = (hash_files(tmp_path / f, ["a", "b"]) for f in ("one", "two"))
    swapped = {"a": two["b"], "b": two["a"]}
    assert content_sha256(one) == content_sha256(dict(reversed(two.items())))
    assert content_sha256(one) != content_sha256(swapped)


def test_a_missing_and_a_shorter_file_deviate_but_a_changed_one_shows_only_when_read(
    tmp_path: Path,
) -> None:
    for name in "abc":
        (tmp_path / name).write_text("text")
    files = hash_files(tmp_path, ["a", "b", "c"])
    (tmp_path / "a").write_text("TEXT")
    assert deviations(tmp_path, files) == []
    assert changed_files(tmp_path, files) == ["a"]
    (tmp_path / "b").write_text("tex")
    (tmp_path / "c").unlink()
    assert deviations(tmp_path, files) == ["b has 3 bytes instead of 4", "c is missing"]
