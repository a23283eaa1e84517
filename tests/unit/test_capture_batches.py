"""Captures of many sequences: in order, unpadded, never packed, and smaller where memory does not do."""

import weakref

import pytest
import torch

import rebuild.capture.batches as batches
import rebuild.capture.forward as forward
from rebuild.capture.batches import batching_error, capture_all, next_bucket
from rebuild.capture.forward import capture
from rebuild.capture.memory import TooLarge
from rebuild.capture.model import cut, load_whole
from rebuild.errors import StepError
from rebuild.states.captured import Wanted
from tests.support.tiny_states import HIDDEN, make_ids, save_model

KINDS = ["llama", "hybrid"]
EVERYTHING = Wanted((1, 3, 4), pre_norm=True, post_norm=True)
LENGTHS = [50, 48, 47, 40, 39, 12, 11, 5]  # longest first, as a job gives them


@pytest.fixture(scope="session", params=KINDS)
def folder(request, tmp_path_factory):
    return save_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    folder = save_model("llama", tmp_path_factory.mktemp("llama"))
    return load(folder)


@pytest.fixture
def forwards(monkeypatch):
    """The shape of every forward, in order."""
    shapes: list[tuple[int, int]] = []
    plain = forward.pad_right

    def counting(sequences):
        ids = plain(sequences)
        shapes.append(tuple(ids.shape))
        return ids

    monkeypatch.setattr(forward, "pad_right", counting)
    return shapes


def load(folder, dtype="float32"):
    return cut(load_whole(folder, dtype=dtype, devices=["cpu"]), EVERYTHING)


def samples(lengths=LENGTHS):
    return [make_ids(length, seed=place) for place, length in enumerate(lengths)]


def fail_above(monkeypatch, tokens, error):
    """Make every forward of more than so many tokens, padding included, raise `error`."""
    plain = forward.pad_right

    def full(sequences):
        ids = plain(sequences)
        if ids.numel() > tokens:
            raise error
        return ids

    monkeypatch.setattr(forward, "pad_right", full)


def test_one_sample_a_forward_is_the_default_in_the_given_order(llama, forwards):
    unsorted = samples([9, 30, 4])
    captured = list(capture_all(llama, unsorted))
    assert [position for position, _ in captured] == [0, 1, 2]
    assert forwards == [(1, 9), (1, 30), (1, 4)]
    for (_, states), ids in zip(captured, unsorted, strict=True):
        assert torch.equal(states.taps, capture(llama, ids).taps)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padded_batches_give_each_sample_its_own_states_unpadded(folder, dtype):
    target, sequences = load(folder, dtype), samples()
    captured = dict(capture_all(target, sequences, batch_tokens=160))
    assert sorted(captured) == list(range(len(LENGTHS)))
    for position, ids in enumerate(sequences):
        alone = capture(target, ids)
        assert captured[position].taps.shape == (len(ids), 3, HIDDEN)
        for name in ("taps", "pre_norm", "post_norm"):
            seen, right = getattr(captured[position], name), getattr(alone, name)
            assert seen.shape == right.shape
            error = (seen.float() - right.float()).norm() / right.float().norm()
            assert error < (1e-3 if dtype == "float32" else 1e-2)


def test_neighbours_of_similar_length_share_a_forward_of_at_most_batch_tokens(llama, forwards):
    list(capture_all(llama, samples(), batch_tokens=160))
    assert forwards == [(3, 50), (2, 40), (2, 12), (1, 5)]


def test_a_sample_longer_than_batch_tokens_goes_alone():
    assert next_bucket([50, 48, 10, 10], 0, 40) == range(0, 1)
    assert next_bucket([50, 48, 10, 10], 2, 40) == range(2, 4)


def test_a_bucket_counts_as_many_tokens_as_its_longest_wherever_that_stands():
    assert next_bucket([40, 50, 40, 45], 0, 150) == range(0, 3)
    assert next_bucket([40, 50, 40, 45], 0, 149) == range(0, 2)
    assert next_bucket([40, 50, 40, 45], 0, 99) == range(0, 1)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "cublas", "python"],
)
def test_a_bucket_that_does_not_fit_is_halved_and_so_are_those_after_it(
    llama, forwards, monkeypatch, capsys, error
):
    fail_above(monkeypatch, 100, error)
    sequences = samples([50, 50, 50, 50, 50, 50, 30, 30, 30, 30])
    captured = dict(capture_all(llama, sequences, batch_tokens=200))
    assert forwards == [(4, 50), (2, 50), (2, 50), (2, 50), (3, 30), (1, 30)]
    for position, ids in enumerate(sequences):
        assert captured[position].taps.shape[0] == len(ids)
    (line,) = capsys.readouterr().err.splitlines()
    assert "4 samples of up to 50 tokens" in line
    assert "of 100 tokens instead of 200" in line


def test_a_bucket_may_fall_to_single_samples(llama, forwards, monkeypatch, capsys):
    fail_above(monkeypatch, 50, torch.OutOfMemoryError("CUDA out of memory"))
    captured = dict(capture_all(llama, samples([50] * 4), batch_tokens=200))
    assert forwards == [(4, 50), (2, 50), *[(1, 50)] * 4]
    assert len(captured) == 4
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_single_sample_that_does_not_fit_stops_with_its_place_and_length(llama, monkeypatch):
    fail_above(
        monkeypatch, 40, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    )
    arrived = []
    with pytest.raises(TooLarge) as stopped:
        arrived.extend(capture_all(llama, samples([40, 39, 41, 5])))
    assert isinstance(stopped.value, StepError)
    assert (stopped.value.position, stopped.value.length) == (2, 41)
    assert "41 tokens" in stopped.value.what
    assert "2 GiB" in stopped.value.seen
    assert len(arrived) == 2


def test_another_error_is_not_taken_for_full_memory(llama, monkeypatch):
    fail_above(
        monkeypatch, 40, RuntimeError("CUDA error: an illegal memory access was encountered")
    )
    with pytest.raises(RuntimeError, match="illegal"):
        list(capture_all(llama, samples(), batch_tokens=100))


def test_what_the_failed_forward_held_is_free_before_the_next_try(llama, monkeypatch):
    plain, held = forward.empty_states, []

    def remembered(*args):
        assert all(reference() is None for reference in held)
        states = plain(*args)
        if args[1] > 1:
            held.append(weakref.ref(states))
        return states

    def full(sequences):
        if len(sequences) > 1:
            held.append(weakref.ref(ballast := torch.empty(10)))
            raise torch.OutOfMemoryError(f"CUDA out of memory {len(ballast)}")
        return pad(sequences)

    pad = forward.pad_right
    llama_without_norms = type(llama)(llama.decoder, Wanted((1, 3, 4)), llama.devices)
    monkeypatch.setattr(forward, "empty_states", remembered)
    monkeypatch.setattr(forward, "pad_right", full)
    assert len(list(capture_all(llama_without_norms, samples([9, 9]), batch_tokens=18))) == 2
    assert len(held) == 2


@pytest.mark.parametrize(("batch_tokens", "most"), [(None, 1), (30, 3)])
def test_no_more_is_held_than_one_forward_however_many_samples_there_are(llama, batch_tokens, most):
    """Peak memory does not grow with the number of samples: what was yielded is not held any longer."""
    alive, peak = weakref.WeakSet(), 0
    for _, captured in capture_all(llama, samples([10] * 60), batch_tokens):
        alive.add(captured.taps)
        peak = max(peak, len(alive))
    assert peak <= most + 1


def test_samples_are_captured_only_as_they_are_asked_for(llama, forwards):
    captures = capture_all(llama, samples())
    next(captures)
    assert len(forwards) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_error_of_batching_is_rounding_and_stands_for_each_layer(folder, dtype):
    errors = batching_error(load(folder, dtype), samples(), batch_tokens=160)
    assert len(errors) == 3
    assert max(errors) < (1e-3 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("tokens", [slice(None), slice(0, 16)])
def test_the_error_of_batching_shows_a_layer_that_leaks_into_some_tokens_of_one_sample(
    llama, monkeypatch, tokens
):
    plain = batches.capture_batch

    def leaking(target, sequences):
        captured = plain(target, sequences)
        if len(sequences) > 1:
            captured[1].taps[tokens, 1] *= 1.2
        return captured

    monkeypatch.setattr(batches, "capture_batch", leaking)
    errors = batching_error(llama, samples([48, 48]), batch_tokens=96)
    share = len(range(48)[tokens]) / 48
    assert errors[1] == pytest.approx(0.2 * share, rel=0.05)
    assert max(errors[0], errors[2]) < 1e-3


def test_a_state_that_is_not_a_number_makes_the_error_of_batching_infinite(llama, monkeypatch):
    plain = batches.capture_batch

    def spoilt(target, sequences):
        captured = plain(target, sequences)
        captured[0].taps[3, 2] = torch.nan
        return captured

    monkeypatch.setattr(batches, "capture_batch", spoilt)
    assert batching_error(llama, samples([9, 9]), batch_tokens=18)[2] == float("inf")
