"""A drafter trained on our output drafts for the real model: SpecForge's own command trains, z-lab's own loop drafts.

It learns one greedy answer by heart, so that with right data nearly every draft is accepted. A falling loss alone proves
nothing: shifted states, or random ones, can be learnt by heart as well. What tells is the live target, whose states are
other ones than those learnt wherever the data are wrong; hence the shifted copies that must fail.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.drafters import (
    RECIPE,
    Drafting,
    Record,
    StoredTarget,
    Training,
    draft,
    load_drafter,
    train_drafter,
)
from tests.support.trees import copy_tree, run_snakemake, write_config

PROMPT = "Explain to a ten-year-old what a lighthouse is for."
LONGEST_ANSWER = 96
FEWEST_SUPERVISED = 40  # fewer, and a drafter may know the answer from the ids alone
LEARNT = 0.05  # loss, in nats a token; an untrained drafter begins at 11
ACCEPTED = 6  # tokens a forward of the target, of 95 / 12 at most; 1 where no draft is accepted
FAILED = 2


@dataclass(frozen=True)
class Trial:
    """A drafter's training, and its drafts for the live target and for one that answers from the record."""

    training: Training
    live: Drafting
    stored: Drafting


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Record:
    """One greedy answer of the demo's model through the whole workflow, real server included, for this drafter."""
    tree = copy_tree(tmp_path_factory.mktemp("record") / "tree")
    prompts = tree / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    config = write_config(
        tree,
        run="record",
        prompts={"path": str(prompts), "shards": 1},
        model={"source": str(demo_model)},
        sampling={"temperature": 0, "top_p": 1, "max_tokens": LONGEST_ANSWER},
        audit={"limits": {"truncated_share": 1}},
        hidden_states={"drafter": str(RECIPE / "config.json")},
    )
    done = run_snakemake(
        tree, "extracted", "--cores", "all", "--resources", "gpu=4", "--configfile", str(config)
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return Record.read(tree / "results" / "record" / "hidden_states")


@pytest.fixture(scope="module")
def target(demo_model: Path) -> Iterator[Any]:
    """The live target, computing in float32 as the demo's server does on a CPU.

    On one thread: for eight tokens at a time a second one gains nothing, and beside other work it costs much.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


def run_trial(record: Record, model: Path, target: Any, folder: Path) -> Trial:
    """Train a drafter on the record, and let it draft the record's answer."""
    training = train_drafter(record.folder, model, folder / "trained")
    assert training.returncode == 0, training.output
    assert training.checkpoints, training.output
    drafter = load_drafter(training, folder / "exported")
    stored = StoredTarget(record, drafter, target)
    return Trial(training, draft(drafter, target, record), draft(drafter, stored, record))


@pytest.fixture(scope="module")
def trial(
    record: Record, demo_model: Path, target: Any, tmp_path_factory: pytest.TempPathFactory
) -> Trial:
    """The trial of our output as it is."""
    return run_trial(record, demo_model, target, tmp_path_factory.mktemp("trial"))


def test_the_record_has_a_greedy_answer_long_enough_to_tell(record: Record, target: Any) -> None:
    assert len(record.answer) >= FEWEST_SUPERVISED
    with torch.inference_mode():
        logits = target(record.input_ids[None]).logits[0]
    assert torch.equal(logits.argmax(-1)[len(record.prompt) - 1 : -1], record.answer)


def test_the_record_is_learnt_by_heart(trial: Trial) -> None:
    assert trial.training.loss < LEARNT
    assert trial.stored.acceptance >= ACCEPTED


def test_the_live_target_accepts_the_drafts_as_often_as_the_stored_states_promise(
    trial: Trial,
) -> None:
    assert trial.live.acceptance >= ACCEPTED
    assert trial.live.acceptance >= 0.9 * trial.stored.acceptance


def test_drafting_gives_the_stored_answer(trial: Trial, record: Record) -> None:
    assert torch.equal(trial.live.answer, record.answer)


@pytest.mark.parametrize("by", [1, -1])
def test_states_of_a_neighbouring_token_are_learnt_as_well_and_fail_with_the_live_target(
    record: Record, demo_model: Path, target: Any, tmp_path: Path, by: int
) -> None:
    shifted = record.shifted(by, tmp_path / "shifted")
    trial = run_trial(shifted, demo_model, target, tmp_path)
    assert trial.training.loss < LEARNT
    assert trial.stored.acceptance >= ACCEPTED
    assert trial.live.acceptance < FAILED
