"""The settings of `hidden_states` as the run goes by them: the layers settled, contradictions found before anything is planned."""

from typing import Any

from rebuild.formats.needs import check_formats
from rebuild.states.drafter import read_drafter, settle_layers


def settle_states(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the layers that a named drafter reads in place of `auto`.

    Raises:
        StepError: formats, final states or layers contradict each other or the drafter.
    """
    if not settings["enabled"]:
        return settings
    drafter = read_drafter(settings["drafter"]) if settings["drafter"] else None
    layers = settle_layers(settings["layers"], drafter)
    chosen = layers if isinstance(layers, list) else None
    check_formats(settings["formats"], settings["include_last"], chosen)
    return {**settings, "layers": layers}
