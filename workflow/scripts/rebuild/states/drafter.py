"""What a drafter's own configuration says of its target: the layers that it reads have the last word.

Three families of `config.json` are known, and count layers in two ways:

- z-lab's and SpecForge's DFlash, `dflash_config.target_layer_ids`: id k is the output of the 0-based layer k;
- SpecForge's and SGLang's EAGLE-3, `eagle_config.eagle_aux_hidden_state_layer_ids`: the same;
- speculators (`speculators_model_type` is there), `aux_hidden_state_layer_ids` for DFlash and
  `eagle_aux_hidden_state_layer_ids` for EAGLE-3: id k is transformers' `hidden_states[k]`, the output of layer k - 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.files import read_json

SETTING = "hidden_states.drafter"
# Where a list of layers may stand, and what is subtracted from its ids to count as we do.
PLACES = [
    ("dflash_config", "target_layer_ids"),
    ("eagle_config", "eagle_aux_hidden_state_layer_ids"),
]
SPECULATORS = ["aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"]


@dataclass(frozen=True)
class Drafter:
    """A drafter's layers, in our ids, and what its configuration says of the target (None where it does not)."""

    path: Path
    layers: list[int]
    target_layers: int | None
    target_hidden_size: int | None


def read_drafter(setting: str) -> Drafter:
    """Return what the drafter's config.json says; `setting` is that file or the folder it is in.

    Raises:
        StepError: it cannot be read, or names no layers.
    """
    path = Path(setting)
    path = path / "config.json" if path.is_dir() else path
    try:
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        config = read_json(path)
        layers = drafter_layers(config)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StepError(
            "the drafter's configuration cannot be read",
            where=f"{SETTING}: {path}",
            expected="a drafter's config.json, or the folder it is in",
            seen=f"{type(error).__name__}: {error}",
            remedy=f"correct {SETTING}, or set it to null and name the layers in hidden_states.layers",
        ) from error
    if not layers:
        raise StepError(
            "the drafter's configuration names no layers of its target",
            where=f"{SETTING}: {path}",
            expected="dflash_config.target_layer_ids (z-lab, SpecForge), eagle_config.eagle_aux_hidden_state_layer_ids, "
            "or speculators' aux_hidden_state_layer_ids",
            seen=f"the keys {', '.join(sorted(config))}",
            remedy=f"set {SETTING} to null and name the layers in hidden_states.layers",
        )
    return Drafter(path, layers, config.get("num_target_layers"), target_width(config))


def drafter_layers(config: Mapping[str, Any]) -> list[int]:
    """Return the layers that a drafter's configuration names, in our ids; none if it names none."""
    if "speculators_model_type" in config:
        keys = [key for key in SPECULATORS if config.get(key)]
        return [whole_number(layer) - 1 for key in keys[:1] for layer in config[key]]
    for section, key in PLACES:
        if given := (config.get(section) or {}).get(key) or config.get(key):
            return [whole_number(layer) for layer in given]
    return []


def whole_number(value: Any) -> int:
    """Return a layer's id.

    Raises:
        TypeError: it is not a whole number.
    """
    if type(value) is not int:
        raise TypeError(f"{value!r} is no layer id")
    return value


def target_width(config: Mapping[str, Any]) -> int | None:
    """Return the width of the target's states, if the configuration says it: a DFlash drafter is as wide as its target."""
    stated = config.get("target_hidden_size")
    if stated is None and "dflash_config" in config:
        stated = config.get("hidden_size")
    return stated if type(stated) is int else None


def settle_layers(layers: str | list[int], drafter: Drafter | None) -> str | list[int]:
    """Return the layers to capture: the named drafter's, else the setting.

    Raises:
        StepError: `hidden_states.layers` names others than the drafter reads.
    """
    if drafter is None:
        return layers
    if layers not in ("auto", drafter.layers):
        raise StepError(
            "two settings name different layers",
            where=f"hidden_states.layers and {SETTING}: {drafter.path}",
            expected=f"hidden_states.layers: auto, or {drafter.layers} as the drafter reads them "
            "(id k is the output of the 0-based layer k)",
            seen=f"hidden_states.layers: {layers}",
            remedy=f"set hidden_states.layers to auto, or {SETTING} to the drafter that is to be trained",
        )
    return drafter.layers


def check_target(drafter: Drafter, num_hidden_layers: int | None, hidden_size: int | None) -> None:
    """Stop if the drafter was made for a target of another depth or width than the staged model, as far as both are known.

    Raises:
        StepError: names the number that differs.
    """
    for name, stated, seen in (
        ("layers", drafter.target_layers, num_hidden_layers),
        ("width", drafter.target_hidden_size, hidden_size),
    ):
        if None not in (stated, seen) and stated != seen:
            raise StepError(
                f"the drafter is for another target: its number of {name} differs",
                where=f"{SETTING}: {drafter.path}",
                expected=f"a target with {name} {stated}",
                seen=f"the staged model's {name}: {seen}",
                remedy=f"correct {SETTING} or model.source",
            )
