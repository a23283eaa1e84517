"""Which layers a drafter reads, in the ids of z-lab, SpecForge and SGLang.

Id k is the output of the 0-based decoder layer k, which transformers calls `hidden_states[k + 1]`.
"""

from collections.abc import Sequence

from rebuild.errors import StepError

SETTING = "hidden_states.layers"


def dflash_layers(num_hidden_layers: int, taps: int = 5) -> list[int]:
    """Return the layers that a DFlash drafter with `taps` taps reads: round(1 + i·(N-4)/(D-1)).

    Source: `build_target_layer_ids` of z-lab's DFlash, kept in SpecForge 0.2.0
    (`specforge/modeling/draft/dflash.py`), Python's rounding of halves included. A published drafter
    may have been trained on other layers: its own config wins over this formula.
    """
    if taps == 1:
        return [num_hidden_layers // 2]
    return [round(1 + i * (num_hidden_layers - 4) / (taps - 1)) for i in range(taps)]


def eagle3_layers(num_hidden_layers: int) -> list[int]:
    """Return the three layers that EAGLE-3 drafters read by default: outputs of layers 1, N/2 - 1 and N - 4.

    Source: SGLang 0.5.23 (`set_eagle3_layers_to_capture`) captures before layers 2, N/2 and N - 3.
    """
    return [1, num_hidden_layers // 2 - 1, num_hidden_layers - 4]


def choose_layers(
    setting: str | Sequence[int], num_hidden_layers: int, *, eagle3: bool = False
) -> list[int]:
    """Return the layers of `hidden_states.layers`: the given ids, or for `auto` those of DFlash, or of EAGLE-3.

    Raises:
        StepError: the ids do not fit the model (see `check_layers`), or the word is unknown.
    """
    if setting == "auto":
        layers = (eagle3_layers if eagle3 else dflash_layers)(num_hidden_layers)
    elif isinstance(setting, str):
        raise StepError(
            f"{SETTING} is not understood",
            expected="auto, or a list of layer ids",
            seen=repr(setting),
            remedy=f"correct {SETTING} in the config",
        )
    else:
        layers = list(setting)
    check_layers(layers, num_hidden_layers)
    return layers


def check_layers(layers: Sequence[int], num_hidden_layers: int | None) -> None:
    """Stop unless the ids are whole numbers, ascending, each once, and layers of the model, if that is known yet.

    Raises:
        StepError: names the first id that is wrong, and what would be right.
    """
    faults = [describe_fault(layers, at, num_hidden_layers) for at in range(len(layers))]
    fault = next(filter(None, faults), "" if layers else "the list is empty")
    if fault:
        raise StepError(
            f"these layers cannot be captured: {fault}",
            where=SETTING,
            expected=f"ascending ids {in_range(num_hidden_layers)}, each once (id k is the output of the 0-based layer k)",
            seen=str(list(layers)),
            remedy=f"name the layers in {SETTING}, those of the drafter's own config if it has one",
        )


def in_range(num_hidden_layers: int | None) -> str:
    """Return in words which ids there are."""
    return "from 0" if num_hidden_layers is None else f"between 0 and {num_hidden_layers - 1}"


def describe_fault(layers: Sequence[int], at: int, num_hidden_layers: int | None) -> str:
    """Return what is wrong with the id at position `at`, or an empty string."""
    layer = layers[at]
    if isinstance(layer, bool) or not isinstance(layer, int):
        return f"{layer!r} is not a whole number"
    if layer < 0 or (num_hidden_layers is not None and layer >= num_hidden_layers):
        return f"the model has no layer {layer}"
    if layer in layers[:at]:
        return f"layer {layer} is named twice"
    if at and layer < layers[at - 1]:
        return f"layer {layer} comes after layer {layers[at - 1]}"
    return ""
