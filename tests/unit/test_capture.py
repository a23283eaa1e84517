"""Capture: the wanted layers exactly as a plain forward has them, and nothing beyond."""

import json

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from rebuild.errors import StepError
from rebuild.states.capture import capture, load_target
from tests.support.tiny_states import HIDDEN, LAYERS, build_model, make_ids, save_model

KINDS = ["llama", "qwen3", "hybrid", "hybrid_with_vision"]
TAPS = [1, 3, 4]


@pytest.fixture(scope="session", params=KINDS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, save_model(request.param, folder)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def load(folder, layers=TAPS, dtype="float32"):
    return load_target(folder, layers, dtype=dtype, device="cpu")


def plain_states(kind, ids, layers):
    """What transformers says: its hidden_states[k + 1] is the output of layer k."""
    with torch.no_grad():
        outputs = build_model(kind)(torch.tensor([ids]), output_hidden_states=True)
    return torch.cat([outputs.hidden_states[k + 1][0] for k in layers], dim=-1)


def test_states_equal_a_plain_forward_of_the_whole_model(model):
    kind, folder = model
    ids = make_ids(37, seed=1)
    states = capture(load(folder), ids, "float32")
    assert states.shape == (37, len(TAPS) * HIDDEN)
    assert (states - plain_states(kind, ids, TAPS)).abs().max() < 1e-3


def test_every_layer_is_its_own_not_a_neighbours(llama):
    ids = make_ids(20, seed=2)
    states = capture(load(llama, list(range(LAYERS - 1))), ids, "float32")
    plain = plain_states("llama", ids, range(LAYERS - 1))
    for k, block in enumerate(states.chunk(LAYERS - 1, dim=-1)):
        errors = [(block - other).norm() for other in plain.chunk(LAYERS - 1, dim=-1)]
        assert min(range(LAYERS - 1), key=errors.__getitem__) == k


def test_the_last_layer_is_taken_before_the_final_norm(llama):
    ids = make_ids(20, seed=3)
    states = capture(load(llama, [LAYERS - 1]), ids, "float32")
    whole = build_model("llama")
    with torch.no_grad():
        normed = whole(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        assert (whole.model.norm(states) - normed).abs().max() < 1e-3
    assert (states - normed).abs().max() > 1e-2


def test_nothing_is_computed_after_the_last_wanted_layer(llama, monkeypatch):
    calls = {LlamaDecoderLayer: 0, LlamaRMSNorm: 0}
    for kind in calls:

        def counting(self, *args, kind=kind, plain=kind.forward, **kwargs):
            calls[kind] += 1
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", counting)
    capture(load(llama), make_ids(9, seed=4), "float32")
    assert calls == {LlamaDecoderLayer: TAPS[-1] + 1, LlamaRMSNorm: 2 * (TAPS[-1] + 1)}


def test_the_cut_model_keeps_no_layer_norm_or_head_beyond_it(model):
    decoder = load(model[1]).decoder
    assert len(decoder.layers) == decoder.config.num_hidden_layers == TAPS[-1] + 1
    assert len(getattr(decoder.config, "layer_types", None) or decoder.layers) == TAPS[-1] + 1
    assert {name.split(".")[0] for name, _ in decoder.named_parameters()} == {
        "embed_tokens",
        "layers",
    }


def test_states_are_bit_equal_with_one_thread_and_with_two(model):
    target, ids, threads = load(model[1]), make_ids(130, seed=5), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(capture(target, ids, "float32"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_states_of_a_beginning_do_not_depend_on_what_follows(model):
    target, ids = load(model[1]), make_ids(60, seed=6)
    whole, beginning = capture(target, ids, "float32"), capture(target, ids[:41], "float32")
    assert (whole[:41] - beginning).abs().max() < 1e-5


def test_states_are_stored_rounded_once_from_the_forward_pass(llama):
    target, ids = load(llama), make_ids(12, seed=7)
    states = capture(target, ids, "bfloat16")
    assert states.dtype == torch.bfloat16
    assert torch.equal(states, capture(target, ids, "float32").to(torch.bfloat16))


def test_a_layer_that_alters_its_input_in_place_does_not_alter_what_was_captured(
    llama, monkeypatch
):
    target, ids = load(llama), make_ids(12, seed=8)
    right = capture(target, ids, "float32")
    plain = LlamaDecoderLayer.forward

    def careless(self, hidden_states, *args, **kwargs):
        output = plain(self, hidden_states, *args, **kwargs)
        hidden_states.zero_()
        return output

    monkeypatch.setattr(LlamaDecoderLayer, "forward", careless)
    assert torch.equal(capture(target, ids, "float32"), right)


def test_a_layer_that_gives_a_tuple_is_read_at_its_first_element(llama, monkeypatch):
    target, ids = load(llama), make_ids(12, seed=9)
    right = capture(target, ids, "float32")
    plain = LlamaDecoderLayer.forward

    def older(self, hidden_states, *args, **kwargs):
        if isinstance(hidden_states, tuple):
            hidden_states = hidden_states[0]
        return plain(self, hidden_states, *args, **kwargs), "attention weights"

    monkeypatch.setattr(LlamaDecoderLayer, "forward", older)
    assert torch.equal(capture(target, ids, "float32"), right)


def test_a_model_whose_layers_do_not_all_run_stops(llama):
    target = load(llama)
    target.decoder.config.num_hidden_layers = 3
    with pytest.raises(StepError) as stopped:
        capture(target, make_ids(5, seed=10), "float32")
    assert "[1, 3, 4]" in stopped.value.expected
    assert "[1]" in stopped.value.seen


def test_no_hook_stays_behind_even_when_the_forward_fails(llama):
    target = load(llama)
    with pytest.raises(IndexError):
        capture(target, [10**6], "float32")
    assert not any(layer._forward_hooks for layer in target.decoder.layers)


def test_weights_that_are_not_in_the_files_stop_instead_of_being_made_up(llama, tmp_path):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS + 1
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StepError) as stopped:
        load(tmp_path)
    assert stopped.value.where == str(tmp_path)
    assert f"layers.{LAYERS}." in stopped.value.seen
