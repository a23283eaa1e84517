"""Models from the hub: a revision's commit, and the download of what a server needs, resumed where it broke off."""

import shutil
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars

from rebuild.errors import StepError
from rebuild.model.copies import check_space
from rebuild.model.files import BESIDE_WEIGHTS, MIB, TEMPLATE_FOLDERS
from rebuild.progress import Progress
from rebuild.step import say

WANTED = BESIDE_WEIGHTS | {".safetensors"}


def resolve_commit(repo: str, revision: str) -> str:
    """Return the commit hash that a branch or tag of `repo` points to now."""
    return str(repository_facts(repo, revision).sha)


def download(repo: str, commit: str, folder: Path) -> None:
    """Fetch the weights, tokenizer, template and configs of `repo` at `commit` into `folder`.

    Raises:
        StepError: the hub cannot be reached or refuses, or the disk is too full.
    """
    sizes = {
        file.rfilename: file.size or 0
        for file in repository_facts(repo, commit).siblings
        if is_wanted(Path(file.rfilename))
    }
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    check_space(folder, max(sum(sizes.values()) - there, 0))
    say(f"fetching {repo}@{commit[:12]}: {len(sizes)} files, {sum(sizes.values()) / 1e9:.2f} GB")
    progress = Progress(sum(sizes.values()) // MIB, "MiB fetched")
    disable_progress_bars()
    for name, size in sizes.items():  # the client fetches the pieces of a big file side by side
        try:
            hf_hub_download(repo, name, revision=commit, local_dir=folder)
        except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
            raise unreachable(repo, commit, error) from error
        progress.update(size // MIB, note=name)
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def is_wanted(name: Path) -> bool:
    """Return whether a file of the repository is part of the model: at its top, or one of several templates."""
    at_top = name.parent == Path() and name.suffix in WANTED
    return at_top or (str(name.parent) in TEMPLATE_FOLDERS and name.suffix == ".jinja")


def repository_facts(repo: str, revision: str) -> Any:
    """Return what the hub says of a repository at a revision: commit, file names and sizes."""
    if constants.HF_HUB_OFFLINE:
        raise StepError(
            "the model has to be fetched, but HF_HUB_OFFLINE forbids it",
            where=f"{repo}@{revision}",
            expected="a commit that was fetched before, or access to the hub",
            remedy="unset HF_HUB_OFFLINE, or download the model elsewhere and name its folder in model.source",
        )
    try:
        return HfApi().model_info(repo, revision=revision, files_metadata=True)
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise unreachable(repo, revision, error) from error


def unreachable(repo: str, revision: str, error: Exception) -> StepError:
    """Return the error for a repository that does not answer or refuses."""
    return StepError(
        "the model cannot be fetched from the hub",
        where=f"{repo}@{revision}",
        expected="a public repository, or one that the token in HF_TOKEN may read",
        seen=f"{type(error).__name__}: {error}",
        remedy="check the name, the revision and the network, then run again: what was fetched so far is kept",
    )
