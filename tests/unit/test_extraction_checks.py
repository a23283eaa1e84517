"""What a job proves before it captures anything, on a canary and on a shard after it, with a real (random) model."""

import json
from contextlib import contextmanager

import pytest
import torch

import extract_hidden_states as step
import rebuild.capture.batches
import rebuild.capture.forward
import rebuild.capture.model
import rebuild.extraction.capturing
from rebuild.capture import batches
from rebuild.capture.forward import plain_reference
from rebuild.capture.model import cut, load_whole
from rebuild.errors import StepError
from rebuild.files import write_json
from rebuild.serving.server import ServerDied
from rebuild.states.captured import Wanted
from rebuild.tables import GENERATED, TableWriter, iter_rows, read_metadata
from tests.support.tiny_states import (
    ExtractionRun,
    build_model,
    save_model,
    tokenized_row,
    write_manifest,
    write_tokenized,
)

CANARY = {f"c{size}_gen0": size for size in (12, 20, 28, 36, 44)}
SHARD = {f"s{size}_gen0": size for size in (15, 25, 35)}
FORMATS = ["specforge", "speculators", "modelopt"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runs(tmp_path, llama, monkeypatch):
    """A canary and a shard of one run, approved; the server's log-probabilities of the canary are the model's own."""
    monkeypatch.setenv("REBUILD_LEASE_DIR", str(tmp_path / "leases"))
    folder = tmp_path / "run"
    manifest = write_manifest(tmp_path / "manifest.json", llama)
    canary, shard = ExtractionRun(folder, manifest, "canary"), ExtractionRun(folder, manifest)
    for run, lengths in ((canary, CANARY), (shard, SHARD)):
        write_tokenized(
            run.tokenized, [tokenized_row(name, size) for name, size in lengths.items()]
        )
    write_generated(canary)
    shards = {"canary": {"user_turns": len(CANARY)}, "00000": {"user_turns": len(SHARD)}}
    write_json(folder / "prompts" / "manifest.json", {"assign": "contiguous", "shards": shards})
    return canary, shard


def own_logprobs(row):
    """Return the log-probabilities that the model gives the row's answer."""
    with torch.no_grad():
        logits = build_model("llama")(torch.tensor([row["input_ids"]])).logits[0]
    following = torch.tensor(row["input_ids"][1:])[:, None]
    logprobs = logits[:-1].log_softmax(-1).gather(1, following)[:, 0]
    return logprobs[len(row["input_ids"]) // 3 - 1 :].tolist()


def write_generated(run, logprobs=own_logprobs):
    """Write the answers of a tokenized shard as the server gave them."""
    rows = []
    for row in iter_rows(run.tokenized):
        begins = row["loss_mask"].index(1)
        rows.append(
            dict.fromkeys(GENERATED.names)
            | {
                "sample_id": row["sample_id"],
                "prompt_token_ids": row["input_ids"][:begins],
                "response_token_ids": row["input_ids"][begins:],
                "response_logprobs": logprobs(row),
            }
        )
    path = run.folder / "generated" / f"{run.shard}.parquet"
    with TableWriter(path, GENERATED, {}) as writer:
        writer.write(rows)


def extract(run, **changes):
    changes = {"cross_check": False} | changes
    step.extract_hidden_states(**run.arguments(**changes))


def test_the_canary_agrees_with_its_server_and_says_so(runs, capsys):
    canary, _ = runs
    extract(canary)
    said = capsys.readouterr().err
    assert said.count("nats from the server's") == len(CANARY)
    checks = json.loads(read_metadata(canary.index)["checks"])
    assert len(checks["logprob_gaps"]) == len(CANARY) and max(checks["logprob_gaps"]) < 1e-4
    assert checks["errors"] == {"capture": [0.0, 0.0, 0.0]}
    assert all(row["logprob"] < -4 for row in iter_rows(canary.index))


def test_another_model_than_the_one_that_answered_stops_the_canary(runs):
    canary, _ = runs
    write_generated(canary, lambda row: [value + 0.3 for value in own_logprobs(row)])
    with pytest.raises(StepError, match="not the one that answered") as stopped:
        extract(canary)
    assert "0.300 nats apart" in stopped.value.seen
    assert not canary.index.exists() and not list(canary.states.glob("*.ckpt"))
    extract(canary, limits=canary.arguments()["settings"]["limits"] | {"logprob_gap": 0.4})


def test_answers_shifted_by_a_token_stop_the_canary(runs):
    canary, _ = runs
    write_generated(canary, lambda row: [*own_logprobs(row)[1:], -6.0])
    with pytest.raises(StepError, match="not the one that answered"):
        extract(canary)


def test_penalties_that_are_in_the_servers_numbers_are_not_compared(runs, capsys):
    canary, _ = runs
    write_generated(canary, lambda row: [0.0] * len(own_logprobs(row)))
    arguments = canary.arguments(cross_check=False)
    arguments["around"].sampling["repetition_penalty"] = 1.1
    step.extract_hidden_states(**arguments)
    assert "log-probabilities are not compared" in capsys.readouterr().err


def test_a_shard_recomputes_a_sample_of_its_own_and_one_of_the_canary(runs, capsys):
    canary, shard = runs
    extract(canary)
    capsys.readouterr()
    extract(shard)
    said = capsys.readouterr().err
    assert "shard 00000, sample s25_gen0: mean log-probability" in said
    assert "likely as the canary's" in said
    assert "shard canary, sample c28_gen0: log-probabilities" in said
    assert [row["logprob"] is not None for row in iter_rows(shard.index)] == [False, True, False]


def test_a_shard_whose_answers_are_unlikely_to_the_model_is_stopped(runs):
    canary, shard = runs
    extract(canary)
    limits = shard.arguments()["settings"]["limits"] | {"logprob_drop": -5.0}
    with pytest.raises(StepError, match="does not find its own answer likely") as stopped:
        extract(shard, limits=limits)
    assert stopped.value.where == "shard 00000, sample s25_gen0"


def test_a_shard_is_extracted_though_the_canarys_tables_are_gone(runs):
    canary, shard = runs
    extract(canary)
    canary.tokenized.unlink()
    extract(shard)
    assert [row["sample_id"] for row in iter_rows(shard.index)] == list(SHARD)


def off_by_one(monkeypatch, layers):
    """Have the hooks of these layers take the next layer's output."""
    plain = rebuild.capture.forward.tapped

    def shifted(decoder, places):
        return plain(decoder, [(layer + (layer in layers), place) for layer, place in places])

    monkeypatch.setattr(rebuild.capture.forward, "tapped", shifted)
    monkeypatch.setattr(rebuild.capture.forward, "check_order", lambda *_: None)


def test_layers_that_are_off_by_one_are_named_with_those_that_match(runs, monkeypatch):
    canary, _ = runs
    off_by_one(monkeypatch, {3})
    with pytest.raises(StepError, match="states of layer 3 are not those of a plain") as stopped:
        extract(canary, layers=[1, 3, 6])
    assert "layer 4 matches better, with 0" in stopped.value.seen
    assert not list(canary.states.glob("*.ckpt"))


def test_a_layer_of_another_size_than_in_the_canary_stops_the_shard(runs, monkeypatch):
    canary, shard = runs
    extract(canary)
    plain = rebuild.extraction.capturing.measure

    def louder(captured, layers):
        if len(captured.taps) == 15:
            captured.taps[:, 1] *= 8
        return plain(captured, layers)

    monkeypatch.setattr(rebuild.extraction.capturing, "measure", louder)
    with pytest.raises(StepError, match="layer 3 are of another size") as stopped:
        extract(shard)
    assert stopped.value.where == "shard 00000, sample s15_gen0"
    written = {path.name for path in shard.states.glob("*.ckpt")}
    assert written == {"s35_gen0.ckpt", "s25_gen0.ckpt"}


def test_one_capture_gives_every_format(runs):
    canary, _ = runs
    extract(canary, formats=FORMATS, include_last="none")
    index = list(iter_rows(canary.index))
    assert [(row["sample_id"], row["format"]) for row in index] == [
        (name, kind) for name in CANARY for kind in FORMATS
    ]
    files = [canary.index.parent / row["file"] for row in index]
    assert all(path.is_file() for path in files) and len(set(files)) == len(index)
    model = build_model("llama")
    for row in index:
        assert row["final_rms"] > 0
        if row["format"] == "modelopt":
            stored = torch.load(canary.index.parent / row["file"], weights_only=True)
            with torch.no_grad():
                expected = model.model(stored["input_ids"][None]).last_hidden_state[0]
            torch.testing.assert_close(
                stored["hidden_states"].float(), expected, rtol=2**-8, atol=1e-3
            )


def test_a_lost_file_of_one_format_brings_its_sample_back_alone(runs, capsys):
    canary, _ = runs
    extract(canary, formats=FORMATS)
    before = {row["file"]: row["sha256"] for row in iter_rows(canary.index)}
    (canary.states / "speculators" / "hidden_states" / "hs_2.safetensors").unlink()
    canary.index.unlink()
    capsys.readouterr()
    extract(canary, formats=FORMATS)
    assert "5 samples, 4 already whole" in capsys.readouterr().err
    assert {row["file"]: row["sha256"] for row in iter_rows(canary.index)} == before


def test_a_subset_takes_the_canary_whole_and_the_rest_of_the_others(runs):
    canary, shard = runs
    extract(canary, samples=6)
    extract(shard, samples=6)
    assert len(list(iter_rows(canary.index))) == 5
    assert [row["sample_id"] for row in iter_rows(shard.index)] == ["s25_gen0"]


def test_a_length_that_cuts_every_answer_away_stops(runs):
    canary, _ = runs
    with pytest.raises(StepError, match="no sample has anything to train on") as stopped:
        extract(canary, max_length=4)
    assert stopped.value.seen.startswith("5 samples without")


def test_a_drafter_for_another_target_stops_though_the_model_is_staged(runs, tmp_path):
    canary, _ = runs
    drafter = tmp_path / "config.json"
    write_json(drafter, {"num_target_layers": 64, "dflash_config": {"target_layer_ids": [1, 3, 4]}})
    with pytest.raises(StepError, match="the drafter is for another target"):
        extract(canary, drafter=str(drafter))


def test_padded_batches_are_measured_against_one_at_a_time(runs, capsys):
    canary, _ = runs
    extract(canary, batch_tokens=100)
    said = capsys.readouterr().err
    assert "padded batches against one at a time: largest error of a layer" in said
    with pytest.raises(StepError, match="padding changes the hidden states too much"):
        limits = canary.arguments()["settings"]["limits"] | {"batching_error": -1.0}
        extract(canary, batch_tokens=101, limits=limits, fingerprint="other")


def test_states_that_do_not_fit_the_limit_stop_before_the_model_is_loaded(runs, monkeypatch):
    canary, shard = runs
    monkeypatch.delattr(rebuild.capture.model, "load_whole")
    with pytest.raises(StepError, match="do not fit hidden_states.max_disk_gb = 1e-06") as stopped:
        extract(canary, max_disk_gb=1e-6)
    assert "the whole run judging by its canary" in stopped.value.where
    with pytest.raises(StepError, match="do not fit hidden_states.max_disk_gb"):
        extract(shard, max_disk_gb=1e-6)


def test_memory_that_runs_out_names_the_sample(runs, monkeypatch):
    _canary, shard = runs
    plain = rebuild.capture.forward.capture_batch

    def full(target, sequences):
        if len(sequences[0]) == 35:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(target, sequences)

    monkeypatch.setattr(rebuild.capture.batches, "capture_batch", full)
    with pytest.raises(StepError) as stopped:
        extract(shard)
    assert "35" in stopped.value.describe() and "s35_gen0" in stopped.value.describe()


# Servers that are lost


@pytest.fixture
def engine(monkeypatch):
    """Stand in for servers: what each of them does, one after another, with a lease and no process."""
    script = []

    @contextmanager
    def captures(model, *, wanted, **_):
        yield script.pop(0)

    def references(model, sequences, **_):
        whole = load_whole(model, dtype="float32", devices=["cpu"])
        return [plain_reference(whole, ids) for ids in sequences]

    monkeypatch.setattr("rebuild.capture.engine.engine_capture", captures)
    monkeypatch.setattr("rebuild.capture.apart.references_apart", references)
    monkeypatch.setattr("rebuild.extraction.backends.translate_flags", lambda *_: {})
    return script


def answering(llama, then=None, after=0):
    """Return what a server captures, and after so many samples of a call of several fails with `then`."""
    target = cut(load_whole(llama, dtype="float32", devices=["cpu"]), Wanted((1, 3, 4)))

    def capture_all(sequences):
        for number, (position, captured) in enumerate(batches.capture_all(target, sequences)):
            if then is not None and len(sequences) > 2 and number == after:
                raise then
            yield position, captured

    return capture_all


def lost(what, ready=True):
    error = ServerDied(what)
    error.ready = ready
    return error


def test_the_next_server_gets_what_the_lost_one_left(runs, engine, llama, capsys):
    _, shard = runs
    engine += [answering(llama, lost("it ended at work"), after=1), answering(llama)]
    extract(shard, backend="sglang")
    assert [row["sample_id"] for row in iter_rows(shard.index)] == list(SHARD)
    said = capsys.readouterr().err
    assert "the server was lost: it ended at work; starting another" in said
    assert "2/2 samples" in said and engine == []


def test_servers_are_not_replaced_for_ever(runs, engine, llama):
    _, shard = runs
    engine += [answering(llama, lost("it ended at work"), after=0) for _ in range(9)]
    with pytest.raises(ServerDied, match="it ended at work"):
        extract(shard, backend="sglang")
    assert len(engine) == 9 - 4  # server.max_restarts is 3


def test_two_servers_that_never_get_ready_are_enough(runs, engine, llama):
    _, shard = runs
    engine += [answering(llama, lost("it was not ready", ready=False)) for _ in range(9)]
    with pytest.raises(ServerDied, match="it was not ready"):
        extract(shard, backend="sglang")
    assert len(engine) == 7
