"""What determines a run's data: the recipe, its fingerprints, and the check that nothing is mixed or redone by accident."""

from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.files import read_json, sha256_json, write_json
from rebuild.prompts.sources import source_identity

SCHEMA_VERSION = "1"

# Raised by hand when a phase's code would make other data from the same settings.
SEMANTICS = {"prompts": 1, "model": 1, "generate": 1, "tokenize": 1, "hidden_states": 1}

SETTINGS = {
    "prompts": ["prompts.shards", "prompts.assign", "prompts.limit", "plan.canary"],
    "model": ["model.source", "model.revision"],
    "generate": [
        "sampling",
        "server.flags",
        "server.external",
        "generate.history_reasoning",
        "generate.min_answer_tokens",
    ],
    "tokenize": [
        "tokenize.max_length",
        "tokenize.min_loss_tokens",
        "tokenize.allow_template",
        "generate.truncated",
    ],
    "hidden_states": [
        "hidden_states.backend",
        "hidden_states.layers",
        "hidden_states.include_last",
        "hidden_states.formats",
        "hidden_states.dtype",
        "hidden_states.max_length",
        "hidden_states.samples",
        "hidden_states.batch_tokens",
    ],
}
UPSTREAM = {
    "prompts": [],
    "model": [],
    "generate": ["prompts", "model"],
    "tokenize": ["generate"],
    "hidden_states": ["tokenize"],
}
FOLDERS = {
    "prompts": ["prompts"],
    "model": ["model"],
    "generate": ["generated"],
    "tokenize": ["tokenized", "audit", "export"],
    "hidden_states": ["hidden_states"],
}

# SGLang flags that set how much runs at once and what is logged, not what is answered.
CAPACITY_FLAGS = {
    "mem-fraction-static",
    "max-running-requests",
    "max-total-tokens",
    "max-prefill-tokens",
    "chunked-prefill-size",
    "schedule-policy",
    "schedule-conservativeness",
    "cuda-graph-max-bs",
    "cuda-graph-bs",
    "enable-hierarchical-cache",
    "hicache-ratio",
    "hicache-size",
    "max-mamba-cache-size",
    "disable-radix-cache",
    "download-dir",
    "log-level",
    "log-requests",
    "watchdog-timeout",
}

Recipe = dict[str, Any]


def make_recipe(config: dict[str, Any]) -> Recipe:
    """Return the recipe of a complete configuration: per phase its settings, semantics version and fingerprint."""
    phases: dict[str, Any] = {}
    for phase, keys in SETTINGS.items():
        settings = {key: data_value(config, key) for key in keys}
        if phase == "generate" and answers_without_ids(config):
            settings["tokenize.allow_template"] = True
        identity = {
            "settings": settings,
            "semantics": SEMANTICS[phase],
            "upstream": [phases[name]["fingerprint"] for name in UPSTREAM[phase]],
        }
        phases[phase] = {
            "settings": settings,
            "semantics": SEMANTICS[phase],
            "fingerprint": sha256_json(identity),
        }
    return {"schema_version": SCHEMA_VERSION, "run": config["run"], "phases": phases}


def answers_without_ids(config: dict[str, Any]) -> bool:
    """Whether an answer without token ids is an answer: from servers of others only, ours always return them."""
    return bool(config["server"]["external"] and config["tokenize"]["allow_template"])


def data_value(config: dict[str, Any], key: str) -> Any:
    """Return the value at a dotted key, without the server flags that cannot change an answer."""
    value: Any = config
    for part in key.split("."):
        value = value[part]
    if key == "server.external":
        return bool(value)  # whose servers answer counts, not where they are
    if key == "hidden_states.formats":
        value = sorted(value)  # all are written, in whatever order they are named
    if key == "server.flags":
        value = {flag: setting for flag, setting in value.items() if flag not in CAPACITY_FLAGS}
    return plain(value)


def plain(value: Any) -> Any:
    """Return the value as JSON gives it back, whole numbers without a decimal point: 1.0 is no change from 1."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def fingerprints(recipe: Recipe) -> dict[str, str]:
    """Return the fingerprint of every phase: a hash of its settings and of everything before it."""
    return {phase: part["fingerprint"] for phase, part in recipe["phases"].items()}


def check_recipe(folder: Path, recipe: Recipe, prompts: Path) -> None:
    """Refuse to go on in `folder` (results/<run>) with data made under another recipe or from other prompts.

    Raises:
        StepError: names the changed keys, the finished results they contradict, and the ways out.
    """
    recorded = folder / "recipe.json"
    if not recorded.exists():
        check_unrecorded(folder, recipe)
        return
    changes = changed_settings(read_recipe(recorded), recipe)
    changes["prompts"] += changed_sources(folder / "prompts" / "manifest.json", prompts)
    first = next((phase for phase in SETTINGS if changes[phase]), None)
    reached = downstream({phase for phase in SETTINGS if changes[phase]})
    affected = [phase for phase in SETTINGS if phase in reached]
    at_stake = [path for phase in affected for path in existing_results(folder, phase)]
    if first is None or not at_stake:
        return
    lines = [line for phase in SETTINGS for line in changes[phase]]
    removal = "rm -r " + " ".join(map(str, at_stake))
    raise StepError(
        f"the configuration contradicts what is already in {folder}; nothing is redone or mixed by accident",
        where=str(recorded),
        expected="the settings that these results were made with",
        seen="; ".join(lines),
        remedy=f"set the keys back; or give the new data a new name (run: …); or, to give up those results: {removal}",
    )


def check_unrecorded(folder: Path, recipe: Recipe) -> None:
    """Refuse results whose recipe is lost and whose own fingerprint is not this recipe's.

    Raises:
        StepError: names a file of the first phase that differs.
    """
    for phase, expected in fingerprints(recipe).items():
        results = existing_results(folder, phase)
        for path in sorted(results[0].glob("*.parquet")) if results else []:
            from rebuild.tables import (
                read_metadata,
            )  # here: a start with a recipe need not load pyarrow

            seen = read_metadata(path).get("fingerprint")
            if seen not in (expected, None):
                raise StepError(
                    f"{folder} holds results of other settings, and its recipe.json is gone",
                    where=str(path),
                    expected=f"fingerprint {expected[:12]} of phase {phase}",
                    seen=f"fingerprint {seen[:12]}",
                    remedy="bring recipe.json back or set the settings as they were; or give the new data a new name "
                    "(run: …)",
                )
            break


def read_recipe(path: Path) -> Recipe:
    """Return a recorded recipe.

    Raises:
        StepError: it is not a recipe.
    """
    try:
        recipe: Recipe = read_json(path)
        if all({"settings", "semantics"} <= part.keys() for part in recipe["phases"].values()):
            return recipe
        seen = "a phase without its settings"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        seen = f"{type(error).__name__}: {error}"
    raise StepError(
        f"cannot read the recipe {path}, so it is not known what its results were made from",
        expected="the file as the workflow wrote it",
        seen=seen,
        remedy="bring it back from a copy; or, if you know that the settings are the same, "
        f"have it written again: rm {path}",
    )


def record_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe, which `check_recipe` has found to agree with all results, into `folder` (results/<run>)."""
    path = folder / "recipe.json"
    if not path.exists() or read_json(path) != recipe:
        write_json(path, recipe)


def changed_settings(old: Recipe, new: Recipe) -> dict[str, list[str]]:
    """Return, per phase, a line `key: old -> new` for every setting that differs."""
    changes: dict[str, list[str]] = {}
    for phase, part in new["phases"].items():
        before = old["phases"].get(phase, {"settings": {}, "semantics": None})
        was, now = flatten(before["settings"]), flatten(part["settings"])
        lines = [
            f"{path}: {in_words(was, path)} -> {in_words(now, path)}"
            for path in dict.fromkeys([*now, *was])
            if in_words(was, path) != in_words(now, path)
        ]
        if before["semantics"] != part["semantics"]:
            lines.append(f"{phase} semantics: {before['semantics']} -> {part['semantics']}")
        changes[phase] = lines or unnamed_change(phase, old, new)
    return changes


def unnamed_change(phase: str, old: Recipe, new: Recipe) -> list[str]:
    """Return a line if the phase's fingerprint changed by itself: another version of the workflow counts otherwise."""
    was = {name: part.get("fingerprint") for name, part in old["phases"].items()}
    now = fingerprints(new)
    inherited = any(was.get(name) != now[name] for name in UPSTREAM[phase])
    return [f"what determines {phase}"] if was.get(phase) != now[phase] and not inherited else []


def in_words(settings: dict[str, Any], path: str) -> str:
    """Return a setting as it is shown in a message."""
    return repr(settings[path]) if path in settings else "unset"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys; an empty one leaves none."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, part in value.items():
        flat |= flatten(part, f"{prefix}.{key}" if prefix else str(key))
    return flat


def changed_sources(manifest: Path, prompts: Path) -> list[str]:
    """Return a line if the prompts at the configured path are not those that were sharded.

    Files are read again only where size or modification time differ; a source that is gone proves nothing.
    """
    if not manifest.exists() or not prompts.exists():
        return []
    recorded = read_json(manifest)["sources"]
    before = [entry["sha256"] for entry in recorded]
    after = [entry["sha256"] for entry in source_identity(prompts, recorded)]
    return [] if before == after else [f"content of prompts.path ({prompts})"]


def downstream(phases: set[str]) -> set[str]:
    """Return `phases` and every phase that is made from one of them."""
    reached = set(phases)
    for phase, sources in UPSTREAM.items():
        if reached.intersection(sources):
            reached.add(phase)
    return reached


def existing_results(folder: Path, phase: str) -> list[Path]:
    """Return the result folders of a phase that hold anything; hidden files are locks and logs of what is not there yet."""
    candidates = [folder / name for name in FOLDERS[phase]]
    return [path for path in candidates if any(is_result(file) for file in path.rglob("*"))]


def is_result(path: Path) -> bool:
    """Tell whether a path is a file or link that is not hidden."""
    return not path.name.startswith(".") and (path.is_symlink() or path.is_file())
