"""The files that make up a model: which they are, whether they are whole, and what their content hashes to."""

import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from rebuild.errors import StepError
from rebuild.files import read_json
from rebuild.progress import Progress

INDEX = "model.safetensors.index.json"
BESIDE_WEIGHTS = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
TEMPLATE_FOLDERS = ("chat_templates", "additional_chat_templates")
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
MIB = 2**20
PIECE = 32 * MIB
THREADS = min(8, os.cpu_count() or 1)


class FileFacts(TypedDict):
    """What the manifest keeps of one file."""

    size: int
    sha256: str


def check_folder(folder: Path) -> list[str]:
    """Return the sorted names of the files that make up the model in `folder`.

    Weights count only as safetensors; of the other files, those that a server or a tokenizer reads.

    Raises:
        StepError: a part is missing or cut short, or the weights are pickled only.
    """
    if not (folder / "config.json").is_file():
        raise StepError(
            "this folder holds no model",
            where=str(folder),
            expected="config.json, safetensors weights and a tokenizer",
            seen=", ".join(sorted(path.name for path in folder.glob("*"))[:12]) or "nothing",
            remedy="point model.source at the folder that config.json lies in",
        )
    beside = [path.name for path in folder.iterdir() if lies_beside_weights(path)]
    for name in beside:
        if name.endswith(".json"):
            check_json(folder / name)
    weights = weight_names(folder)
    for name in weights:
        check_weights(folder / name)
    templates = [path for sub in TEMPLATE_FOLDERS for path in folder.glob(f"{sub}/*.jinja")]
    return sorted([*weights, *beside, *(str(path.relative_to(folder)) for path in templates)])


def lies_beside_weights(path: Path) -> bool:
    """Return whether a server or tokenizer may read this file: config, vocabulary, template or model code."""
    hidden_or_pickled = path.name.startswith(".") or path.name.endswith(".bin.index.json")
    return path.suffix in BESIDE_WEIGHTS and path.is_file() and not hidden_or_pickled


def weight_names(folder: Path) -> list[str]:
    """Return the names of the safetensors files: those that the index lists, else all there are."""
    if not (folder / INDEX).is_file():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if not found:
            raise lacks_weights(folder)
        return found
    listed = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    missing = [name for name in listed if not (folder / name).is_file()]
    if missing:
        raise StepError(
            "the model lacks weight files that its index names",
            where=str(folder),
            expected=f"{len(listed)} files named in {INDEX}",
            seen=f"{len(missing)} missing: {', '.join(missing[:5])}",
            remedy="fetch the model again, or copy the missing files there",
        )
    return listed


def lacks_weights(folder: Path) -> StepError:
    """Return the error for a folder without safetensors: another one when the weights are pickled."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickled:
        return StepError(
            "the weights are pickled, and no pickle is ever read: it can run any code",
            where=str(folder),
            expected="*.safetensors",
            seen=", ".join(pickled[:5]),
            remedy="take a revision of the model that has safetensors, or convert it where you trust the file",
        )
    return StepError(
        "the model has no weights",
        where=str(folder),
        expected="*.safetensors beside config.json",
        seen="none",
        remedy="fetch the model again",
    )


def check_json(path: Path) -> None:
    """Raise StepError unless the file is whole JSON."""
    try:
        read_json(path)
    except ValueError as error:
        raise StepError(
            "a file of the model is not whole",
            where=str(path),
            expected="JSON",
            seen=str(error),
            remedy="fetch the model again",
        ) from error


def check_weights(path: Path) -> None:
    """Raise StepError unless the file is as long as its safetensors header says."""
    expected, seen = size_by_header(path), path.stat().st_size
    if seen != expected:
        raise StepError(
            "a weight file is not whole",
            where=str(path),
            expected="a safetensors file"
            if expected is None
            else f"{expected} bytes, by its header",
            seen=f"{seen} bytes",
            remedy="fetch this file again (one of a few hundred bytes is a Git LFS pointer: git lfs pull)",
        )


def size_by_header(path: Path) -> int | None:
    """Return the file's length by its safetensors header (8-byte length, JSON, data), None if it has none."""
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        text = handle.read(length) if length < path.stat().st_size else b""
    try:
        return 8 + length + data_bytes(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def data_bytes(header: dict[str, Any]) -> int:
    """Return where the last tensor of a safetensors header ends, in bytes."""
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return int(max(ends, default=0))


def hash_files(folder: Path, names: list[str]) -> dict[str, FileFacts]:
    """Return size and SHA-256 of each file, read by several threads, with a progress line for big models."""
    total = sum((folder / name).stat().st_size for name in names)
    progress = Progress(total // MIB, f"MiB of {folder.name} hashed")
    lock = threading.Lock()

    def facts(name: str) -> FileFacts:
        digest, size = hashlib.sha256(), 0
        with open(folder / name, "rb") as handle:
            while piece := handle.read(PIECE):
                digest.update(piece)
                size += len(piece)
                with lock:
                    progress.update(len(piece) // MIB)
        return {"size": size, "sha256": digest.hexdigest()}

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(facts, names), strict=True))


def content_sha256(files: dict[str, FileFacts]) -> str:
    """Return one hash for the whole model, wherever it lies: SHA-256 over the sorted (name, sha256) pairs."""
    pairs = sorted((name, facts["sha256"]) for name, facts in files.items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode()).hexdigest()


def deviations(folder: Path, files: dict[str, FileFacts]) -> list[str]:
    """Return what differs, by name and size, between `folder` and the recorded files; nothing is read."""
    found = []
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != facts["size"]:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {facts['size']}")
    return found


def changed_files(folder: Path, files: dict[str, FileFacts]) -> list[str]:
    """Return the names whose content is not the recorded one; every byte is read."""
    found = hash_files(folder, list(files))
    return [name for name in files if found[name] != files[name]]
