"""What each trainer's format needs of a capture, which formats exclude each other, and the bytes they take.

Imports nothing heavy: the workflow asks while it is parsed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rebuild.errors import StepError

NONE, PRE_NORM, POST_NORM = "none", "pre_norm", "post_norm"  # of hidden_states.include_last
SETTING = "hidden_states.formats"


@dataclass(frozen=True)
class Needs:
    """What a format stores of a sample besides the states of the wanted layers, and how large it is.

    `final` is the final state that it prescribes, `optional` the one that `include_last` may add; `taps` is the number
    of layers that it takes, None for any. `value_bytes` is the size of one state's value; `token_bytes` is what else
    a token takes, ids and mask above all; `file_bytes` is the most that a file has around its tensors.
    """

    final: str = NONE
    optional: str = NONE
    taps: int | None = None
    value_bytes: int = 2
    token_bytes: int = 16
    file_bytes: int = 3072


# Of speculators, a token has 8 bytes in its file and 5 in the data set beside it, a scale of FP8 4 more; 512 is for the
# header of a file, and for a sample's length, offsets and id in the data set.
NEEDS = {
    "specforge": Needs(optional=POST_NORM),
    "specforge_eagle3": Needs(final=POST_NORM, taps=3),
    "speculators": Needs(final=PRE_NORM, token_bytes=13, file_bytes=512),
    "speculators_fp8": Needs(final=PRE_NORM, value_bytes=1, token_bytes=17, file_bytes=512),
    "modelopt": Needs(final=POST_NORM, optional=PRE_NORM),
}

EXCLUSIVE = {
    (
        "specforge",
        "specforge_eagle3",
    ): "SpecForge reads every .ckpt below a folder, whoever it is for",
    ("speculators", "speculators_fp8"): "both are numbered hs_0, hs_1, … in the same folder",
}


def wanted_states(formats: Sequence[str], include_last: str) -> tuple[bool, bool]:
    """Return whether these formats need the last layer's output before the final norm, and after it."""
    stored = {state for name in formats for state in final_states(name, include_last)}
    return PRE_NORM in stored, POST_NORM in stored


def final_states(name: str, include_last: str) -> set[str]:
    """Return the final states in a format's files: the one that it prescribes, and the one that it allows if asked for."""
    needs = NEEDS[name]
    return {needs.final, include_last if include_last == needs.optional else NONE} - {NONE}


def bytes_per_token(name: str, layers: int, hidden_size: int, include_last: str) -> int:
    """Return the bytes that one token takes in a format, `layers` of them captured: its states, ids, mask and scale."""
    needs = NEEDS[name]
    states = layers + len(final_states(name, include_last))
    return states * hidden_size * needs.value_bytes + needs.token_bytes


def bytes_per_file(name: str) -> int:
    """Return the most that a sample takes beyond its tokens, in a format: its file's header, its row's length and id."""
    return NEEDS[name].file_bytes


def check_formats(formats: Sequence[str], include_last: str, layers: Sequence[int] | None) -> None:
    """Stop unless the formats can be written together from these layers; None are layers that are not known yet.

    Raises:
        StepError: says what contradicts what.
    """
    faults = [*name_faults(formats), *final_faults(formats, include_last)]
    faults += layer_faults(formats, layers)
    if faults:
        raise StepError(
            f"these formats cannot be written: {faults[0]}",
            where=SETTING,
            expected=f"one or several of {', '.join(NEEDS)}, each once, that fit each other, the layers and "
            "hidden_states.include_last",
            seen=f"formats: {list(formats)}, include_last: {include_last}"
            + ("" if layers is None else f", layers: {list(layers)}"),
            remedy="correct the config; for the format left out, make a second run with its own name",
        )


def name_faults(formats: Sequence[str]) -> list[str]:
    """Return what is wrong with the formats' names and their company."""
    if not formats:
        return ["none is named"]
    faults = [f"there is no format {name!r}" for name in formats if name not in NEEDS]
    faults += [f"{name} is named twice" for name in formats if formats.count(name) > 1]
    pairs = (pair for pair in EXCLUSIVE if set(pair) <= set(formats))
    return faults + [
        f"{' and '.join(pair)} exclude each other: {EXCLUSIVE[pair]}" for pair in pairs
    ]


def final_faults(formats: Sequence[str], include_last: str) -> list[str]:
    """Return what is wrong with the final state that is asked for."""
    if include_last not in (NONE, PRE_NORM, POST_NORM):
        return [
            f"hidden_states.include_last {include_last!r} is none of none, pre_norm and post_norm"
        ]
    if include_last == PRE_NORM and "specforge" in formats:
        return ["SpecForge's files have no place for the last layer's output before the final norm"]
    known = [name for name in formats if name in NEEDS]
    if include_last != NONE and known and not stores(known, include_last):
        return [f"none of them stores what hidden_states.include_last: {include_last} asks for"]
    return []


def stores(formats: Sequence[str], state: str) -> bool:
    """Tell whether one of these formats stores a final state when `include_last` asks for it."""
    return any(state in final_states(name, state) for name in formats)


def layer_faults(formats: Sequence[str], layers: Sequence[int] | None) -> list[str]:
    """Return which formats do not take so many layers."""
    wrong = [
        name
        for name in formats
        if layers is not None and name in NEEDS and NEEDS[name].taps not in (None, len(layers))
    ]
    return [f"{name} takes exactly {NEEDS[name].taps} layers" for name in wrong]
