"""Drafters as others train and run them: SpecForge's command, and z-lab's `dflash_generate`."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.trees import ROOT

PEERS = Path(os.environ.get("REBUILD_PEERS", ".cache/peers")).absolute()
RECIPE = ROOT / "tests" / "peers" / "drafter"
STAND_IN = ROOT / "envs" / "cpu" / "stand_in"
STEP = re.compile(r"^step (\d+): (\{.*\})$", re.MULTILINE)


@dataclass(frozen=True)
class Record:
    """A folder with one sample, and the sample as SpecForge reads it."""

    folder: Path
    input_ids: Tensor  # [S]
    loss_mask: Tensor  # [S]
    hidden_states: Tensor  # [S, layers x hidden]

    @property
    def prompt(self) -> Tensor:
        """The ids before the answer, [P]."""
        return self.input_ids[: len(self.input_ids) - len(self.answer)]

    @property
    def answer(self) -> Tensor:
        """The supervised ids, which end the record, [A]."""
        return self.input_ids[self.loss_mask.bool()]

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Read the only sample in a folder, at whatever depth."""
        (path,) = folder.rglob("*.ckpt")
        return cls(folder, **torch.load(path, weights_only=True))

    def shifted(self, by: int, folder: Path) -> "Record":
        """Write the sample with the states of the token `by` places earlier at every token, and read it again."""
        moved = {"hidden_states": self.hidden_states.roll(by, dims=0)}
        folder.mkdir()
        torch.save(
            {"input_ids": self.input_ids, "loss_mask": self.loss_mask} | moved,
            folder / "shifted.ckpt",
        )
        return self.read(folder)


@dataclass(frozen=True)
class Training:
    """What SpecForge's command left behind."""

    returncode: int
    output: str
    folder: Path

    @property
    def checkpoints(self) -> list[Path]:
        """The weights saved; none if nothing was trained, which the exit status does not tell."""
        return sorted(self.folder.glob("*-step*/training_state.pt"))

    @property
    def loss(self) -> float:
        """The loss of the last step printed."""
        _, metrics = STEP.findall(self.output)[-1]
        return float(ast.literal_eval(metrics)["loss"])


@dataclass(frozen=True)
class Drafting:
    """What came of drafting one answer."""

    answer: Tensor  # [A]
    acceptance: float  # tokens per forward of the target, its own one included


def specforge(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run SpecForge's command as installed; a package stands in for the one of SGLang's that a CPU has not."""
    paths = os.pathsep.join([str(STAND_IN), str(PEERS)])
    return subprocess.run(
        [sys.executable, "-m", "specforge.cli", *arguments],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def train_drafter(states: Path, target: Path, folder: Path) -> Training:
    """Train a drafter of the model in `target` on the files in `states`, as `drafter/train.yaml` says."""
    done = specforge(
        "train",
        f"--config={RECIPE / 'train.yaml'}",
        f"model.target_model_path={target}",
        f"model.draft_model_config={RECIPE / 'config.json'}",
        f"data.hidden_states_path={states}",
        f"output_dir={folder}",
    )
    return Training(done.returncode, done.stdout, folder)


def load_drafter(training: Training, folder: Path) -> Any:
    """Export the trained weights with SpecForge's command, and load them into z-lab's model."""
    done = specforge(
        "export",
        "--to=hf",
        f"--checkpoint={training.folder}",
        f"--draft-config={RECIPE / 'config.json'}",
        f"--output-dir={folder}",
    )
    assert done.returncode == 0, done.stdout
    model, loading = zlab().DFlashDraftModel.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


def zlab() -> Any:
    """Import z-lab's DFlash; it comes last on the path, so that it can shadow nothing of ours."""
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    import dflash.model

    return dflash.model


class StoredTarget(nn.Module):
    """A target that answers from a record: at every token its stored states, and as its choice the stored next id."""

    def __init__(self, record: Record, drafter: Any, live: Any) -> None:
        super().__init__()
        self.record = record
        self.layers = drafter.target_layer_ids
        self.config = drafter.config  # for the shape of the cache alone
        self.lm_head = live.lm_head
        self.device = live.device
        self.get_input_embeddings = live.get_input_embeddings

    def forward(
        self, input_ids: Tensor, *, position_ids: Tensor, past_key_values: Any, **given: Any
    ) -> Any:
        """Answer for these positions; `dflash_generate` crops the cache as it would a live target's."""
        rows = position_ids[0]
        nothing = torch.zeros(1, 1, len(rows), 1)
        past_key_values.update(nothing, nothing, 0)
        following = self.record.input_ids.roll(-1)[rows]
        logits = functional.one_hot(following, self.config.vocab_size).float()[None]
        states = self.record.hidden_states[rows].float().chunk(len(self.layers), dim=-1)
        return SimpleNamespace(
            logits=logits[:, -given.get("logits_to_keep", 0) :],
            hidden_states={k + 1: part[None] for k, part in zip(self.layers, states, strict=True)},
        )


def draft(drafter: Any, target: Any, record: Record) -> Drafting:
    """Let z-lab's loop answer the record's prompt; `dflash_generate` measures time on GPUs alone, so forwards are counted.

    The first forward reads the prompt and gives one token; each later one gives the drafted tokens that the target
    would have said too, and one of its own.
    """
    forwards = []
    hook = target.register_forward_hook(lambda *_: forwards.append(None))
    try:
        ids = zlab().dflash_generate(
            drafter,
            target,
            record.prompt[None],
            max_new_tokens=len(record.answer),
            stop_token_ids=None,
        )
    finally:
        hook.remove()
    answer = ids[0, len(record.prompt) :]
    return Drafting(answer, (len(answer) - 1) / (len(forwards) - 1))
