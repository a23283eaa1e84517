"""Hidden states of token sequences, taken from a forward pass by hooks; and a plain forward to hold them against.

It knows nothing of samples, files or formats.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rebuild.capture.memory import is_out_of_memory, too_large
from rebuild.capture.model import Target, Whole
from rebuild.errors import StepError
from rebuild.states.captured import Captured
from rebuild.states.comparison import compared_tokens
from rebuild.states.policy import Floats
from rebuild.states.reference import Reference

LOGITS_AT_ONCE = 1 << 26  # float32 values, 256 MiB

Places = Sequence[tuple[int, Tensor]]  # layers, and where their outputs go


def capture(target: Target, input_ids: Sequence[int]) -> Captured:
    """Return the wanted states of one sequence, computed alone: they depend on nothing else."""
    (captured,) = capture_batch(target, [input_ids])
    return captured


def capture_batch(target: Target, sequences: Sequence[Sequence[int]]) -> list[Captured]:
    """Return the wanted states of each sequence, from one forward of all of them padded on the right.

    No mask is needed: what stands to the right of a token reaches it neither in causal attention nor in a recurrence.

    Raises:
        StepError: the model did not run every wanted layer once, in order.
    """
    wanted, lengths = target.wanted, [len(ids) for ids in sequences]
    shape = (len(lengths), max(lengths))
    taps = empty_states(target, *shape, len(wanted.layers))
    pre_norm = empty_states(target, *shape) if wanted.pre_norm else None
    post_norm = empty_states(target, *shape) if wanted.post_norm else None
    places = [(layer, taps[:, :, place]) for place, layer in enumerate(wanted.layers)]
    if pre_norm is not None:
        places.append((len(target.decoder.layers) - 1, pre_norm))
    ids = pad_right(sequences).to(target.devices[0])
    with torch.inference_mode(), tapped(target.decoder, places) as seen:
        output = target.decoder(input_ids=ids, use_cache=False)
        if post_norm is not None:
            post_norm.copy_(output.last_hidden_state)
    check_order(seen, [layer for layer, _ in places])
    return [
        Captured(
            to_host(taps[row, :length]),
            None if pre_norm is None else to_host(pre_norm[row, :length]),
            None if post_norm is None else to_host(post_norm[row, :length]),
        )
        for row, length in enumerate(lengths)
    ]


def empty_states(target: Target, *shape: int) -> Tensor:
    """Return room for states, bfloat16 [*shape, H], where they are gathered."""
    return torch.empty(
        (*shape, target.hidden_size), dtype=torch.bfloat16, device=target.devices[-1]
    )


def pad_right(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the ids as int64 [B, longest], filled up with token 0."""
    ids = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(list(sequence), dtype=torch.int64)
    return ids


@contextmanager
def tapped(decoder: Any, places: Places) -> Iterator[list[int]]:
    """Copy each layer's output [B, S, H] into its place the moment it exists; yield the layers seen so far.

    Later, another layer may have altered it.
    """
    seen: list[int] = []

    def tap(layer: int, place: Tensor, output: Any) -> None:
        place.copy_(output[0] if isinstance(output, tuple) else output)
        seen.append(layer)

    hooks = [
        decoder.layers[layer].register_forward_hook(
            lambda _module, _args, output, layer=layer, place=place: tap(layer, place, output)
        )
        for layer, place in places
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def check_order(seen: Sequence[int], wanted: Sequence[int]) -> None:
    """Stop unless each wanted layer ran once, in order."""
    if list(seen) != list(wanted):
        raise StepError(
            "the model did not run each wanted layer once, in order",
            expected=f"outputs of layers {list(wanted)}",
            seen=f"outputs of layers {list(seen)}",
            remedy="this architecture's layers are not a plain stack; it cannot be captured this way",
        )


def to_host(states: Tensor) -> Tensor:
    """Return the states on the CPU in memory of their own, page-locked if they come from a GPU (several times faster)."""
    if states.device.type != "cpu":
        host = torch.empty(states.shape, dtype=states.dtype, pin_memory=states.is_cuda)
        return host.copy_(states)
    alone = states.untyped_storage().nbytes() == states.nbytes
    return states if alone else states.clone()


def plain_reference(
    whole: Whole,
    input_ids: Sequence[int],
    temperatures: Sequence[float] = (),
    positions: Sequence[int] | None = None,
) -> Reference:
    """Run one sample plainly through the whole model, by transformers' own `output_hidden_states`.

    `hidden_states[k + 1]` is the output of layer k, the last layer's excepted, in whose place transformers puts the
    normed state: that one is taken where it enters the norm. Log-probabilities are those of logits / temperature, each
    temperature above 0; 1.0 is always among them. States are kept at `positions`, by default the few that captures are
    compared at, but the devices hold every layer of the whole sample at once.

    Raises:
        TooLarge: the sample does not fit into memory.
    """
    try:
        at = compared_tokens(len(input_ids)) if positions is None else list(positions)
        return run_plainly(whole, input_ids, temperatures, at)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise too_large(0, len(input_ids), error) from error


def run_plainly(
    whole: Whole, input_ids: Sequence[int], temperatures: Sequence[float], positions: list[int]
) -> Reference:
    """Return the reference of one sample; see `plain_reference`."""
    ids = torch.tensor([list(input_ids)], dtype=torch.int64, device=whole.devices[0])
    count = len(whole.decoder.layers)
    with torch.inference_mode(), norm_inputs(whole.decoder) as entering:
        output = whole.model(
            input_ids=ids, output_hidden_states=True, use_cache=False, logits_to_keep=1
        )
    _, *inner, normed = output.hidden_states
    check_order([*range(len(inner)), len(inner) + len(entering) - 1], range(count))
    layers = [kept(states, positions) for states in [*inner, *entering]]
    del output, inner, entering
    logprobs = next_logprobs(whole, normed, ids[0], {1.0, *temperatures})
    return Reference(positions, torch.stack(layers), kept(normed, positions), logprobs)


def kept(states: Tensor, positions: list[int]) -> Tensor:
    """Return states [1, S, H] at these positions, bfloat16 [P, H] on the CPU."""
    return states[0, positions].to("cpu", torch.bfloat16)


@contextmanager
def norm_inputs(decoder: Any) -> Iterator[list[Tensor]]:
    """Yield a list of what enters the final norm [B, S, H], in the order of its calls."""
    entering: list[Tensor] = []
    hook = decoder.norm.register_forward_pre_hook(lambda _norm, args: entering.append(args[0]))
    try:
        yield entering
    finally:
        hook.remove()


def next_logprobs(
    whole: Whole, normed: Tensor, ids: Tensor, temperatures: set[float]
) -> dict[float, Floats]:
    """Return, by temperature, the log-probability of every next id, float32 [S-1], from normed states [1, S, H].

    The logits of some positions at a time, so that [S, V] never exists as a whole.
    """
    length = ids.numel()
    logprobs = {temperature: torch.empty(length - 1) for temperature in sorted(temperatures)}
    rows = max(1, LOGITS_AT_ONCE // whole.decoder.config.vocab_size)
    for start in range(0, length - 1, rows):
        some = slice(start, min(start + rows, length - 1))
        logits = head_logits(whole, normed[:, some])[0].float()
        following = ids[some.start + 1 : some.stop + 1].to(logits.device).unsqueeze(-1)
        for temperature, values in logprobs.items():
            scaled = logits / temperature
            values[some] = (scaled.gather(-1, following)[:, 0] - scaled.logsumexp(-1)).cpu()
    return {temperature: values.numpy() for temperature, values in logprobs.items()}


def head_logits(whole: Whole, normed: Tensor) -> Tensor:
    """Return the logits [1, P, V] of normed states [1, P, H].

    The model's own code makes them, so that whatever it does after its head (a soft cap, a scale) is in them: it runs
    one token through the decoder, whose output is then these states instead.
    """

    def instead(_decoder: Any, _args: Any, output: Any) -> Any:
        output.last_hidden_state = normed
        return output

    hook = whole.decoder.register_forward_hook(instead)
    token = torch.zeros((1, 1), dtype=torch.int64, device=whole.devices[0])
    try:
        with torch.inference_mode():
            logits: Tensor = whole.model(input_ids=token, use_cache=False).logits
            return logits
    finally:
        hook.remove()
