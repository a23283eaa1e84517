"""The target model: whole it is as published, cut it holds and computes what is wanted and nothing more."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from rebuild.capture.forward import capture, plain_reference
from rebuild.capture.model import check_placement, check_stack, cut, load_whole, placement
from rebuild.errors import StepError
from rebuild.states.captured import Wanted
from tests.support.tiny_states import (
    HIDDEN,
    LAYERS,
    PLAIN,
    VISION,
    VOCABULARY,
    build_model,
    make_ids,
    save_model,
)

KINDS = ["llama", "qwen3", "hybrid", "hybrid_with_vision"]
TAPS = (1, 3, 4)


@pytest.fixture(scope="session", params=KINDS)
def model(request, tmp_path_factory):
    return request.param, save_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def load(folder: Path, dtype: str = "float32"):
    return load_whole(folder, dtype=dtype, devices=["cpu"])


def test_the_whole_model_gives_the_logits_of_the_published_one(model):
    kind, folder = model
    ids = torch.tensor([make_ids(23, seed=1)])
    with torch.no_grad():
        published = build_model(kind)(ids).logits
        ours = load(folder).model(input_ids=ids).logits
    assert ours.shape == (1, 23, VOCABULARY)
    assert (ours - published).abs().max() < 1e-4


def test_no_weight_of_a_vision_tower_is_loaded_where_the_text_model_has_a_class_of_its_own(model):
    names = [name for name, _ in load(model[1]).model.named_parameters()]
    assert [name for name in names if "visual" in name or "vision" in name] == []


def test_a_multimodal_model_without_such_a_class_is_captured_at_its_text_decoder(tmp_path):
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = Qwen3VLConfig(
        text_config={**PLAIN, "rope_parameters": rope},
        vision_config={**VISION, "deepstack_visual_indexes": [0]},
    )
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).eval().save_pretrained(tmp_path)
    whole, ids = load(tmp_path), make_ids(19, seed=2)
    reference = plain_reference(whole, ids, positions=range(19))
    target = cut(whole, Wanted(TAPS))
    assert {name.split(".")[0] for name, _ in target.decoder.named_parameters()} == {
        "embed_tokens",
        "layers",
    }
    assert torch.equal(capture(target, ids).taps, reference.layers[list(TAPS)].transpose(0, 1))


@pytest.mark.parametrize(
    ("wanted", "layers", "norms"),
    [
        (Wanted(TAPS), TAPS[-1] + 1, 0),
        (Wanted(TAPS, pre_norm=True), LAYERS, 0),
        (Wanted(TAPS, post_norm=True), LAYERS, 1),
        (Wanted(TAPS, pre_norm=True, post_norm=True), LAYERS, 1),
        (Wanted((), pre_norm=True), LAYERS, 0),
    ],
)
def test_nothing_is_computed_beyond_what_is_wanted(llama, monkeypatch, wanted, layers, norms):
    target = cut(load(llama), wanted)
    calls = {LlamaDecoderLayer: 0, LlamaRMSNorm: 0}
    for kind in calls:

        def counting(self, *args, kind=kind, plain=kind.forward, **kwargs):
            calls[kind] += 1
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", counting)
    capture(target, make_ids(9, seed=4))
    assert calls == {LlamaDecoderLayer: layers, LlamaRMSNorm: 2 * layers + norms}


def test_the_cut_model_keeps_no_layer_norm_or_head_beyond_it(model):
    whole = load(model[1])
    decoder = cut(whole, Wanted(TAPS)).decoder
    assert len(decoder.layers) == decoder.config.num_hidden_layers == TAPS[-1] + 1
    assert len(getattr(decoder.config, "layer_types", None) or decoder.layers) == TAPS[-1] + 1
    assert {name.split(".")[0] for name, _ in decoder.named_parameters()} == {
        "embed_tokens",
        "layers",
    }
    kept = {id(parameter) for parameter in whole.model.parameters()}
    assert kept == {id(parameter) for parameter in decoder.parameters()}


def test_layers_that_the_model_does_not_have_stop(llama):
    with pytest.raises(StepError, match=f"no layer {LAYERS}"):
        cut(load(llama), Wanted((1, LAYERS)))


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


def test_the_model_computes_in_the_dtype_that_was_asked_for(llama):
    for dtype in (torch.float32, torch.bfloat16):
        whole = load(llama, str(dtype).removeprefix("torch."))
        assert {parameter.dtype for parameter in whole.model.parameters()} == {dtype}


def test_one_device_is_loaded_straight_and_several_share_by_their_free_memory(monkeypatch):
    free = {"cuda:0": 80 << 30, "cuda:1": 40 << 30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (free[name], 80 << 30))
    assert placement(["cuda:0"]) == {"device_map": "cuda:0"}
    assert placement(["cuda:0", "cuda:1"]) == {
        "device_map": "balanced",
        "max_memory": {0: int(0.9 * (80 << 30)), 1: int(0.9 * (40 << 30))},
    }


def test_a_model_that_would_partly_be_run_from_the_disk_stops(tmp_path):
    placed = {"model.embed_tokens": 0, "model.layers.0": 1, "model.layers.1": "disk"}
    with pytest.raises(StepError) as stopped:
        check_placement(tmp_path, ["cuda:0", "cuda:1"], placed)
    assert "model.layers.1 from disk" in stopped.value.seen
    check_placement(tmp_path, ["cuda:0", "cuda:1"], {"model": 0, "lm_head": torch.device("cuda:1")})
    check_placement(tmp_path, ["cpu"], {"": torch.device("cpu")})


def test_a_device_that_is_full_while_loading_says_so(llama, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(StepError) as stopped:
        load(llama)
    assert stopped.value.where == str(llama)
    assert "2.00 GiB" in stopped.value.seen


def test_a_model_that_is_no_stack_of_layers_stops(tmp_path):
    decoder = torch.nn.ModuleDict({"blocks": torch.nn.Linear(HIDDEN, HIDDEN)})
    with pytest.raises(StepError, match="ModuleDict with blocks"):
        check_stack(tmp_path, decoder)
