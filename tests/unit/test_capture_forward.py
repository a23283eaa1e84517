"""Capture: the wanted states bit for bit as a plain forward has them, and log-probabilities of the model's own."""

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import rebuild.capture.forward as forward
from rebuild.capture.forward import capture, capture_batch, plain_reference
from rebuild.capture.memory import TooLarge
from rebuild.capture.model import cut, load_whole
from rebuild.errors import StepError
from rebuild.states.captured import Wanted
from rebuild.states.comparison import compared_tokens
from tests.support.tiny_states import HIDDEN, LAYERS, PLAIN, build_model, make_ids, save_model

KINDS = ["llama", "qwen3", "hybrid", "hybrid_with_vision"]
TAPS = (1, 3, 4)
PLAINLY = Wanted(TAPS)
EVERYTHING = Wanted((1, 3, LAYERS - 1), pre_norm=True, post_norm=True)


@pytest.fixture(scope="session", params=KINDS)
def model(request, tmp_path_factory):
    return request.param, save_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def load(folder, dtype="float32"):
    return load_whole(folder, dtype=dtype, devices=["cpu"])


def load_target(folder, wanted=PLAINLY, dtype="float32"):
    return cut(load(folder, dtype), wanted)


def reference_of(whole, ids, *temperatures):
    """Return the reference with the states of every token."""
    return plain_reference(whole, ids, temperatures, range(len(ids)))


def chosen(reference, layers):
    """Return the reference's states of these layers as captures have them, [S, D, H]."""
    return reference.layers[list(layers)].transpose(0, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_states_are_those_of_a_plain_forward_bit_for_bit(model, dtype):
    folder, ids = model[1], make_ids(137, seed=1)
    reference = reference_of(load(folder, dtype), ids)
    captured = capture(load_target(folder, dtype=dtype), ids)
    assert captured.taps.shape == (137, len(TAPS), HIDDEN)
    assert captured.taps.dtype == torch.bfloat16
    assert torch.equal(captured.taps, chosen(reference, TAPS))
    assert captured.pre_norm is captured.post_norm is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_final_state_is_that_of_a_plain_forward_before_and_after_the_norm(model, dtype):
    folder, ids = model[1], make_ids(61, seed=2)
    reference = reference_of(load(folder, dtype), ids)
    captured = capture(load_target(folder, EVERYTHING, dtype), ids)
    assert torch.equal(captured.taps, chosen(reference, EVERYTHING.layers))
    assert torch.equal(captured.pre_norm, reference.layers[-1])
    assert torch.equal(captured.pre_norm, captured.taps[:, -1])
    assert torch.equal(captured.post_norm, reference.post_norm)
    assert not torch.equal(captured.pre_norm, captured.post_norm)


def test_the_reference_has_every_layer_as_the_published_model_does(model):
    kind, folder = model
    ids = make_ids(37, seed=3)
    reference = reference_of(load(folder), ids)
    published = build_model(kind)
    with torch.no_grad():
        output = published(torch.tensor([ids]), output_hidden_states=True)
    assert reference.layers.shape == (LAYERS, 37, HIDDEN)
    assert reference.layers.dtype == reference.post_norm.dtype == torch.bfloat16
    for layer in range(LAYERS - 1):
        assert torch.equal(reference.layers[layer], output.hidden_states[layer + 1][0].bfloat16())
    assert torch.equal(reference.post_norm, output.hidden_states[-1][0].bfloat16())
    with torch.no_grad():
        normed = published.get_decoder().norm(reference.layers[-1].float())
    assert (normed - reference.post_norm.float()).abs().max() < 0.05


def test_a_reference_is_kept_at_the_tokens_that_captures_are_compared_at(llama):
    whole, ids = load(llama), make_ids(200, seed=20)
    everywhere, some = reference_of(whole, ids), plain_reference(whole, ids)
    assert some.positions == compared_tokens(200)
    assert everywhere.positions == list(range(200))
    assert torch.equal(some.layers, everywhere.layers[:, some.positions])
    assert torch.equal(some.post_norm, everywhere.post_norm[some.positions])
    assert some.logprobs[1.0].shape == everywhere.logprobs[1.0].shape == (199,)


def test_every_layer_is_its_own_not_a_neighbours(llama):
    ids = make_ids(20, seed=4)
    reference = reference_of(load(llama), ids).layers.float()
    taps = capture(load_target(llama, Wanted(tuple(range(LAYERS)))), ids).taps.float()
    for layer in range(LAYERS):
        errors = [(taps[:, layer] - other).norm() for other in reference]
        assert min(range(LAYERS), key=errors.__getitem__) == layer


def test_log_probabilities_are_those_of_the_next_ids_at_each_temperature(model):
    kind, folder = model
    ids = make_ids(29, seed=5)
    logprobs = reference_of(load(folder), ids, 0.6).logprobs
    with torch.no_grad():
        logits = build_model(kind)(torch.tensor([ids])).logits[0, :-1]
    assert sorted(logprobs) == [0.6, 1.0]
    for temperature, values in logprobs.items():
        plain = torch.log_softmax(logits / temperature, dim=-1)
        expected = plain.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1))[:, 0]
        assert values.shape == (28,)
        assert values.dtype == np.float32
        assert (torch.from_numpy(values) - expected).abs().max() < 1e-4


def test_log_probabilities_do_not_depend_on_how_many_positions_are_taken_at_once(
    llama, monkeypatch
):
    whole, ids = load(llama), make_ids(29, seed=6)
    once = reference_of(whole, ids).logprobs[1.0]
    most = []
    head = forward.head_logits
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 5 * PLAIN["vocab_size"])
    monkeypatch.setattr(
        forward,
        "head_logits",
        lambda whole, normed: most.append(normed.shape[1]) or head(whole, normed),
    )
    assert np.abs(reference_of(whole, ids).logprobs[1.0] - once).max() < 1e-5
    assert most == [5, 5, 5, 5, 5, 3]


def test_what_a_model_does_after_its_head_is_in_the_log_probabilities(tmp_path):
    torch.manual_seed(0)
    config = Gemma2Config(**PLAIN, final_logit_softcapping=0.1, query_pre_attn_scalar=16)
    published = Gemma2ForCausalLM(config).eval()
    published.save_pretrained(tmp_path)
    ids = make_ids(11, seed=7)
    values = reference_of(load(tmp_path), ids).logprobs[1.0]
    with torch.no_grad():
        plain = published(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        uncapped = published.lm_head(published.model(torch.tensor([ids])).last_hidden_state[0, :-1])
    following = torch.tensor(ids[1:]).unsqueeze(-1)
    assert (torch.from_numpy(values) - plain.gather(-1, following)[:, 0]).abs().max() < 1e-5
    assert (
        torch.from_numpy(values) - uncapped.log_softmax(-1).gather(-1, following)[:, 0]
    ).abs().max() > 1e-3


def test_a_reference_of_one_token_has_states_and_no_log_probability(llama):
    reference = plain_reference(load(llama), [7])
    assert reference.layers.shape == (LAYERS, 1, HIDDEN)
    assert reference.logprobs[1.0].shape == (0,)
    assert not reference.layers.is_inference() and not reference.post_norm.is_inference()


def test_a_sample_too_large_for_a_reference_names_its_length(llama, monkeypatch):
    def full(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    whole = load(llama)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", full)
    with pytest.raises(TooLarge, match="a sample of 31 tokens"):
        plain_reference(whole, make_ids(31, seed=8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_bit_equal_with_one_thread_and_with_two(model, dtype):
    target, ids = load_target(model[1], dtype=dtype), make_ids(130, seed=9)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(capture(target, ids).taps)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_states_of_a_beginning_do_not_depend_on_what_follows(model):
    target, ids = load_target(model[1]), make_ids(60, seed=10)
    whole, beginning = capture(target, ids).taps, capture(target, ids[:41]).taps
    assert (whole[:41].float() - beginning.float()).norm() < 1e-4 * beginning.float().norm()


def test_a_layer_that_alters_its_input_in_place_does_not_alter_what_was_captured(
    llama, monkeypatch
):
    target, ids = load_target(llama), make_ids(12, seed=11)
    right = capture(target, ids).taps
    plain = LlamaDecoderLayer.forward

    def careless(self, hidden_states, *args, **kwargs):
        output = plain(self, hidden_states, *args, **kwargs)
        hidden_states.zero_()
        return output

    monkeypatch.setattr(LlamaDecoderLayer, "forward", careless)
    assert torch.equal(capture(target, ids).taps, right)


def test_a_layer_that_gives_a_tuple_is_read_at_its_first_element(llama, monkeypatch):
    target, ids = load_target(llama), make_ids(12, seed=12)
    right = capture(target, ids).taps
    plain = LlamaDecoderLayer.forward

    def older(self, hidden_states, *args, **kwargs):
        if isinstance(hidden_states, tuple):
            hidden_states = hidden_states[0]
        return plain(self, hidden_states, *args, **kwargs), "attention weights"

    monkeypatch.setattr(LlamaDecoderLayer, "forward", older)
    assert torch.equal(capture(target, ids).taps, right)


def test_a_state_that_is_not_a_number_is_handed_on_as_it_is(llama):
    target, ids = load_target(llama), make_ids(12, seed=13)
    right = capture(target, ids).taps

    def spoil(_layer, _args, output):
        output[0, 5] = torch.nan
        return output

    hook = target.decoder.layers[TAPS[-1]].register_forward_hook(spoil)
    spoilt = capture(target, ids).taps
    hook.remove()
    assert spoilt[5, -1].isnan().all()
    assert torch.equal(spoilt[:, :-1], right[:, :-1])
    assert torch.equal(spoilt.isnan().sum(), torch.tensor(HIDDEN))


def test_a_model_whose_layers_do_not_all_run_stops(llama):
    target = load_target(llama)
    target.decoder.config.num_hidden_layers = 3
    with pytest.raises(StepError) as stopped:
        capture(target, make_ids(5, seed=14))
    assert "[1, 3, 4]" in stopped.value.expected
    assert "[1]" in stopped.value.seen


def test_a_reference_of_a_model_whose_layers_do_not_all_run_stops(llama):
    whole = load(llama)
    whole.decoder.config.num_hidden_layers = 3
    with pytest.raises(StepError, match="once, in order"):
        plain_reference(whole, make_ids(5, seed=15))


def test_no_hook_stays_behind_even_when_the_forward_fails(llama):
    whole = load(llama)
    with pytest.raises(IndexError):
        plain_reference(whole, [10**6])
    assert not whole.decoder.norm._forward_pre_hooks
    target = load_target(llama)
    with pytest.raises(IndexError):
        capture(target, [10**6])
    assert not any(layer._forward_hooks for layer in target.decoder.layers)


def test_what_is_captured_is_contiguous_and_shares_no_memory_with_another_sample(llama):
    target = load_target(llama, EVERYTHING)
    for captured in capture_batch(target, [make_ids(7, seed=16), make_ids(9, seed=17)]):
        for states in (captured.taps, captured.pre_norm, captured.post_norm):
            assert states.is_contiguous()
            assert states.untyped_storage().nbytes() == states.nbytes
            assert not states.is_inference()


def test_layers_that_accelerate_brings_in_only_when_they_run_give_the_same_states(model):
    folder, ids = model[1], make_ids(33, seed=18)
    right = capture(load_target(folder, EVERYTHING), ids)
    whole = load(folder)
    for layer in whole.decoder.layers[2:5]:
        cpu_offload(layer, torch.device("cpu"))
    target = cut(whole, EVERYTHING)
    assert {weight.device.type for weight in target.decoder.layers[3].parameters()} == {"meta"}
    captured = capture(target, ids)
    assert torch.equal(captured.taps, right.taps)
    assert torch.equal(captured.post_norm, right.post_norm)


def test_a_model_that_accelerate_spread_has_the_same_reference_and_states(model, tmp_path):
    folder, ids = model[1], make_ids(33, seed=19)
    right = reference_of(load(folder), ids)
    whole = load(folder)
    places = {f"model.layers.{layer}": "disk" if layer > 3 else "cpu" for layer in range(LAYERS)}
    rest = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
    dispatch_model(whole.model, {**dict.fromkeys(rest, "cpu"), **places}, offload_dir=tmp_path)
    spread = reference_of(whole, ids)
    assert torch.equal(spread.layers, right.layers)
    assert np.array_equal(spread.logprobs[1.0], right.logprobs[1.0])
    captured = capture(cut(whole, Wanted((1, 3, 5), pre_norm=True)), ids)
    assert torch.equal(captured.taps, chosen(right, (1, 3, 5)))
    assert torch.equal(captured.pre_norm, right.layers[-1])
