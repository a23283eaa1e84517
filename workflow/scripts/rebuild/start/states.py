"""The settings of `hidden_states` as the run goes by them: the layers settled, contradictions found before anything is planned."""

from pathlib import Path
from typing import Any

from rebuild.files import read_json
from rebuild.formats.needs import check_formats
from rebuild.states.drafter import check_target, read_drafter, settle_layers
from rebuild.states.layers import check_layers


def settle_states(settings: dict[str, Any], model_manifest: Path) -> dict[str, Any]:
    """Return the settings with the layers that a named drafter reads in place of `auto`.

    Where the model is staged already (its manifest is there) layers and drafter are held against it too.

    Raises:
        StepError: formats, final states or layers contradict each other, the drafter or the model.
    """
    if not settings["enabled"]:
        return settings
    drafter = read_drafter(settings["drafter"]) if settings["drafter"] else None
    layers = settle_layers(settings["layers"], drafter)
    chosen = layers if isinstance(layers, list) else None
    check_formats(settings["formats"], settings["include_last"], chosen)
    depth, width = model_size(model_manifest)
    if chosen is not None:
        check_layers(chosen, depth)
    if drafter is not None:
        check_target(drafter, depth, width)
    return {**settings, "layers": layers}


def model_size(manifest: Path) -> tuple[int | None, int | None]:
    """Return the staged model's layers and width, None each where no manifest says them; jobs complain of a damaged one."""
    try:
        model = read_json(manifest)
        return model["num_hidden_layers"], model["hidden_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
