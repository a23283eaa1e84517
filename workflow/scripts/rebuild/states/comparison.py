"""How far two captures of the same sample are apart, layer by layer, and which layer a capture really is of.

Layers that are off by one train a drafter to the same loss and the same acceptance, so nothing downstream would show
them. A comparison with every layer of a reference does: for the right layer the relative error is that of rounding
(about 0.002 in bfloat16), for its neighbour 0.2 and more.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rebuild.errors import StepError

WINDOWS, WINDOW = 4, 16  # of neighbouring tokens, so that a shift by one shows as well
CLEARLY = (
    0.5  # another layer matches better only if its error is less than this part of the wanted one's
)


def compared_tokens(length: int) -> list[int]:
    """Return the positions at which captures of a sample of `length` tokens are compared: a few windows, first to last."""
    if length <= WINDOWS * WINDOW:
        return list(range(length))
    starts = [round(number * (length - WINDOW) / (WINDOWS - 1)) for number in range(WINDOWS)]
    return [start + offset for start in starts for offset in range(WINDOW)]


def relative_error(seen: Tensor, expected: Tensor) -> float:
    """Return the mean over tokens of |seen - expected| / |expected| of states [P, H]; NaN counts as infinite.

    The median would hide what is wrong with fewer than half of the tokens.
    """
    seen, expected = seen.float(), expected.float()
    errors = (seen - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-12)
    return float(errors.nan_to_num(nan=torch.inf, posinf=torch.inf).mean())


def check_layers_agree(
    taps: Tensor,
    every_layer: Tensor,
    layers: Sequence[int],
    *,
    limit: float,
    where: str,
    against: str,
) -> list[float]:
    """Return the error of each captured layer against a reference that has every layer of the model.

    `taps` is [P, D, H], `every_layer` [N, P, H], both at the same P tokens; `against` names the reference.

    Raises:
        StepError: a layer is further off than `limit`, or another layer, or a shift by a token, matches better.
    """
    errors = []
    for place, layer in enumerate(layers):
        seen = taps[:, place]
        each = [relative_error(seen, other) for other in every_layer]
        errors.append(each[layer])
        best = min(range(len(each)), key=each.__getitem__)
        if each[layer] <= limit and not (best != layer and each[best] < CLEARLY * each[layer]):
            continue
        raise StepError(
            f"the captured states of layer {layer} are not those of {against}",
            where=where,
            expected=f"a relative error (mean over {len(taps)} tokens) of at most {limit:g}, and no other layer "
            "that matches better",
            seen=f"{each[layer]:.4g}; {what_matches(seen, every_layer, layer, best, each)}",
            remedy="if another layer or token matches, the capture is off by that much and must not be used: check the "
            "installed transformers and sglang against envs/. If none does, the weights or the arithmetic differ "
            "(another model, quantization): compare the model with its manifest, or, for a quantized server, set "
            "hidden_states.limits.engine_error to what it is known to differ by",
        )
    return errors


def what_matches(
    seen: Tensor, every_layer: Tensor, layer: int, best: int, each: Sequence[float]
) -> str:
    """Return in words what the states match better than the layer they are said to be of."""
    if best != layer and each[best] < CLEARLY * each[layer]:
        return f"layer {best} matches better, with {each[best]:.4g}"
    shifts = {by: relative_error(seen, every_layer[layer].roll(by, 0)) for by in (-1, 1)}
    by = min(shifts, key=shifts.__getitem__)
    if shifts[by] < CLEARLY * each[layer]:
        return f"the states of the {'next' if by < 0 else 'previous'} token match better, with {shifts[by]:.4g}"
    return f"no other layer matches better (the best, layer {best}, has {each[best]:.4g})"


def check_states_agree(
    seen: Tensor, expected: Tensor, *, limit: float, where: str, what: str, against: str
) -> float:
    """Return the relative error of states [P, H] that have no neighbouring layers to be mistaken for.

    Raises:
        StepError: it is more than `limit`.
    """
    error = relative_error(seen, expected)
    if error > limit:
        raise StepError(
            f"{what} is not that of {against}",
            where=where,
            expected=f"a relative error (mean over {len(seen)} tokens) of at most {limit:g}",
            seen=f"{error:.4g}",
            remedy="compare the model's files with its manifest, and the installed transformers and sglang with envs/",
        )
    return error
