"""What becomes of hidden states when jobs, servers, disks, files, models or the engine fail: named, and nothing is lost.

The Snakefile, the models and the servers are real. Two extractions are killed and resumed, one for each backend; their
undisturbed twins are what everything else is held against.
"""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import extract_hidden_states as step
import rebuild.capture.apart
import rebuild.capture.engine_flags
import rebuild.extraction.backends
import rebuild.extraction.checked
from rebuild.capture.engine import engine_capture
from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from rebuild.model.manifest import load_manifest
from rebuild.serving.devices import select_devices
from rebuild.serving.lease import lease_devices
from rebuild.states.captured import Wanted
from rebuild.states.parts import read_log
from rebuild.tables import iter_rows, read_metadata
from tests.faults.extraction_kills import (
    Extraction,
    digests,
    prepare,
    run_matrix,
    run_whole,
)
from tests.support import faulty_hook
from tests.support.approved_runs import RUN, approve, approved_run
from tests.support.models import tiny_qwen36
from tests.support.real_shards import qwen36, smollm2
from tests.support.shards import Shard, rewrite
from tests.support.tiny_states import ExtractionRun
from tests.support.trees import ROOT, run_snakemake

CANARY = 12
LAYERS = [1, 8, 9, 20]  # two of them neighbours
ROUNDING = 2**-7  # what two ways of computing may differ by, of a token's size: bfloat16 has 8 bits
Matrices = tuple[Extraction, Extraction]


@pytest.fixture(scope="module")
def base(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of SmolLM2 that waits to be extracted. Not to be written to."""
    folder = tmp_path_factory.mktemp("approved") / "tree"
    return approved_run(folder, demo_model, smollm2, canary=CANARY, rows=3)


@pytest.fixture(scope="module")
def transformers(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Matrices:
    """An undisturbed extraction and one that was killed and resumed."""
    return run_matrix(base, tmp_path_factory.mktemp("transformers"), "transformers", 4, seed=7)


@pytest.fixture(scope="module")
def sglang(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Matrices:
    """The same by the server's own capture."""
    return run_matrix(base, tmp_path_factory.mktemp("sglang"), "sglang", 2, seed=7)


# Kills


def test_killed_and_resumed_states_are_what_they_would_have_been(transformers: Matrices):
    _, killed = transformers
    assert killed.problems == []
    assert killed.seen["job SIGKILL"] == killed.seen["driver SIGKILL"] == 1
    assert killed.seen["went on to the end"] == 1
    assert killed.seen["finished and compared"] >= 2


def test_so_are_those_of_a_server_whose_scheduler_and_job_were_killed(sglang: Matrices):
    _, killed = sglang
    assert killed.problems == []
    assert killed.seen["scheduler SIGKILL"] == killed.seen["job SIGKILL"] == 1
    assert killed.seen["went on to the end"] == killed.seen["server replaced"] == 1
    assert killed.seen["finished and compared"] >= 2


# Both backends


def check_same_states(ours: Extraction, theirs: Extraction) -> None:
    """Hold the files of two backends against each other, token by token."""
    names = sorted(digests(ours))
    assert names == sorted(digests(theirs)) != []
    for name in names:
        one, other = (torch.load(run.states / name, weights_only=True) for run in (ours, theirs))
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["loss_mask"], other["loss_mask"])
        one, other = one["hidden_states"].float(), other["hidden_states"].float()
        assert float(((one - other).norm(dim=1) / other.norm(dim=1)).max()) < ROUNDING


def checks_of(run: Extraction) -> dict[str, Any]:
    checks: dict[str, Any] = json.loads(read_metadata(run.tree / run.target)["checks"])
    return checks


def test_both_backends_write_the_same_states_of_a_dense_model(
    transformers: Matrices, sglang: Matrices
):
    check_same_states(sglang[0], transformers[0])
    for run, _ in (transformers, sglang):
        checks = checks_of(run)
        assert len(checks["logprob_gaps"]) == CANARY and max(checks["logprob_gaps"]) < 1e-3
        assert max(checks["errors"]["capture"]) < 0.005


def test_both_backends_write_the_same_states_of_a_hybrid_model(tmp_path: Path):
    model = tiny_qwen36()
    base = approved_run(tmp_path / "base", model, qwen36, canary=5, rows=1)
    runs = [
        prepare(base, tmp_path / backend, model, backend=backend)
        for backend in ("transformers", "sglang")
    ]
    for run in runs:
        run_whole(run)
        assert run.problems == []
        assert len(checks_of(run)["logprob_gaps"]) == 5
        assert max(map(max, checks_of(run)["errors"].values())) < 0.005
    assert set(checks_of(runs[0])["errors"]) == {"capture", "engine"}
    check_same_states(*runs)


# Disks and files


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a file system of that size over a folder, as root alone can; yield a path on it for a file that fills it."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.fail(f"this test mounts a small disk, which needs root: {mounted.stderr}")
    try:
        yield folder / "filler"
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(filler: Path) -> None:
    """Write until the disk takes no more."""
    with open(filler, "ab", buffering=0) as file:
        for piece in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(bytes(piece))
            except OSError:
                continue


@contextmanager
def filling(run: Extraction, filler: Path, parts: int) -> Iterator[None]:
    """Beside the block, fill the disk as soon as so many parts are recorded."""
    over = threading.Event()

    def go() -> None:
        while len(run.parts()) < parts and not over.is_set():
            time.sleep(0.005)
        fill(filler)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_full_disk_stops_the_shard_and_with_room_it_goes_on_after_what_is_whole(
    base: Path, demo_model: Path, transformers: Matrices, tmp_path: Path
):
    run = prepare(base, tmp_path / "tree", demo_model, cross_check=False)
    with small_disk(run.states, mib=300) as filler:
        with filling(run, filler, parts=2):
            stopped = run_snakemake(run.tree, *run.command()[3:])
        said = stopped.stdout + stopped.stderr
        assert stopped.returncode == 1
        assert "No space left on device" in said and "STOPPED: " in said
        assert "the hidden states do not fit the disk" in said  # the second attempt does not begin
        recorded = [part["file"] for part in run.parts()]
        assert 2 <= len(recorded) < CANARY
        assert sorted(written(run)) == sorted(recorded)
        filler.unlink()
        (run.states / recorded[0]).write_bytes((run.states / recorded[0]).read_bytes()[:-1])
        flip(run.states / recorded[1])
        kept = {file: (run.states / file).stat().st_ino for file in recorded[2:]}
        run_whole(run)
        assert run.problems == []
        assert f"{CANARY} samples, {len(kept)} already whole" in run.log()
        assert kept == {file: (run.states / file).stat().st_ino for file in kept}
        assert digests(run) == digests(transformers[0])


def written(run: Extraction) -> list[str]:
    """Return the files in the shard's folder that are not the workflow's own notes."""
    files = (path for path in (run.states / "canary").iterdir())
    notes = (".parts.jsonl", ".checks.json")
    return [f"canary/{path.name}" for path in files if path.name not in notes]


def flip(path: Path) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# What the engine hands over


@dataclass(frozen=True)
class Served:
    """Shards of a run, and a server that captures their states with whatever fault is set."""

    run: Path
    faults: Path
    folder: Path
    canary: dict[str, dict[str, Any]]

    def arguments(self, shard: str) -> dict[str, Any]:
        run = ExtractionRun(self.run, self.run / "model" / "manifest.json", shard)
        return run.arguments(layers=LAYERS, backend="sglang")

    def extract(self, shard: str = "00000") -> None:
        step.extract_hidden_states(**self.arguments(shard))

    def files(self, shard: str = "00000") -> set[str]:
        """Return the names of the files for trainers."""
        return {path.name for path in (self.run / "hidden_states" / shard).glob("*.ckpt")}

    def forget(self, shard: str = "00000") -> None:
        """Remove what there is of a shard's states."""
        shutil.rmtree(self.run / "hidden_states" / shard, ignore_errors=True)
        (self.run / "hidden_states" / f"{shard}.parquet").unlink(missing_ok=True)

    def fault(self, kind: str, length: int | None) -> None:
        write_json(self.faults, {"kind": kind, "length": length})

    def lengths(self, shard: str = "00000") -> dict[str, int]:
        """Return the samples' lengths, the longest first."""
        rows = iter_rows(self.run / "tokenized" / f"{shard}.parquet")
        found = {row["sample_id"]: row["seq_len"] for row in rows}
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


@pytest.fixture(scope="module")
def served(
    base: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """A server that stays for all faults of this module, in the place of each job's own; the canary is extracted."""
    folder = tmp_path_factory.mktemp("served")
    run = folder / RUN
    shutil.copytree(base / "results" / RUN, run)
    faults = folder / "fault.json"
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setenv(faulty_hook.VARIABLE, str(faults))
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("OMP_NUM_THREADS", "1")  # as Snakemake does for a job
    patch.setattr(rebuild.extraction.checked, "CANARY_CHECKED", 4)
    patch.setattr(rebuild.capture.engine_flags, "HOOK", f"{faulty_hook.__name__}:make_hook")
    patch.setattr(rebuild.capture.apart, "references_apart", remembered(folder))
    with lease_devices(1, select_devices(["cpu"]), folder=folder / "leases") as lease:
        server = engine_capture(
            dict(load_manifest(run / "model" / "manifest.json")),
            wanted=Wanted(tuple(LAYERS)),
            flags={},
            tensor_parallel=1,
            lease=lease,
            stand_in=ROOT / "envs" / "cpu" / "stand_in",
            logs=folder / "logs",
            scratch=folder / "scratch",
            longest=2048,
            ready_s=600,
            stall_s=60,
        )
        with server as capture_all:
            lent = nullcontext(capture_all)
            patch.setattr(rebuild.extraction.backends, "engine", lambda *_: lent)
            found = Served(run, faults, folder / "scratch" / "captured", {})
            found.extract("canary")
            yield found


def remembered(folder: Path) -> Callable[..., Any]:
    """Return `references_apart` that computes what it is asked for a second time only once."""
    plain = rebuild.capture.apart.references_apart
    known: dict[str, Any] = {}

    def references(model: Path, sequences: Any, **how: Any) -> Any:
        key = json.dumps([str(model), sequences])
        if key not in known:
            known[key] = plain(model, sequences, **how)
        return known[key]

    return references


@pytest.fixture
def sound(served: Served) -> Iterator[Served]:
    """The server without a fault, and the shard anew."""
    served.faults.unlink(missing_ok=True)
    served.forget()
    yield served
    served.faults.unlink(missing_ok=True)


# Fault, whether it befalls the sample that is checked at the start (else the shortest one), and what is said of it.
ENGINE_FAULTS = [
    ("nan", False, "layer 8 are not finite"),
    ("nan", True, "layer 8 are not finite"),
    ("zero", False, "layer 9 are all zero"),
    ("next layer", True, "layer 9 matches better"),
    ("previous token", True, "the states of the previous token match better"),
    ("louder", False, "layer 1 are of another size than any in the canary"),
    ("other ids", False, "the server computed other tokens than the sample's"),
]


@pytest.mark.parametrize(("kind", "at_start", "said"), ENGINE_FAULTS)
def test_a_fault_in_the_engines_states_is_named_and_nothing_of_the_sample_is_written(
    sound: Served, kind: str, at_start: bool, said: str
):
    (longest, _), (middle, checked), (shortest, length) = sound.lengths().items()
    sound.fault(kind, checked if at_start else length)
    with pytest.raises(StepError) as stopped:
        sound.extract()
    assert said in stopped.value.describe()
    befallen = middle if at_start else shortest
    assert f"shard 00000, sample {befallen}" in stopped.value.where
    whole = set() if at_start else {f"{longest}.ckpt", f"{middle}.ckpt"}
    assert sound.files() <= whole
    recorded = {part["sample_id"] for part in read_log(sound.run / "hidden_states" / "00000")}
    assert f"{befallen}.ckpt" not in sound.files() and befallen not in recorded
    sound.faults.unlink()
    sound.extract()
    assert sound.files() == {f"{name}.ckpt" for name in sound.lengths()}


def test_a_full_disk_between_server_and_job_is_named(sound: Served):
    with small_disk(sound.folder, mib=16) as filler:
        fill(filler)
        with pytest.raises(StepError, match="could not write a sample's states") as stopped:
            sound.extract()
    assert f"is there room in {sound.folder}" in stopped.value.remedy
    assert sound.files() == set()
    sound.extract()
    assert sound.files() == {f"{name}.ckpt" for name in sound.lengths()}


# Models and ids


@pytest.fixture
def own_model(
    base: Path, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ExtractionRun:
    """The canary of a run, a few of whose samples are recomputed; the model is a copy that may be written to."""
    monkeypatch.setattr(rebuild.extraction.checked, "CANARY_CHECKED", 3)
    run, folder = tmp_path / "run", tmp_path / "model"
    shutil.copytree(base / "results" / RUN, run)
    folder.mkdir()
    for file in demo_model.iterdir():
        (folder / file.name).symlink_to(file)
    manifest = run / "model" / "manifest.json"
    write_json(manifest, read_json(manifest) | {"path": str(folder), "source": str(folder)})
    return ExtractionRun(run, manifest, "canary")


def refused(run: ExtractionRun) -> StepError:
    """Return why the canary's states cannot be captured."""
    with pytest.raises(StepError) as stopped:
        step.extract_hidden_states(**run.arguments(cross_check=False))
    assert not run.index.exists() and not list(run.states.glob("*.ckpt"))
    return stopped.value


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write the model's weights anew with a change; the file that the link leads to stays as it is."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path.with_name("changed"), metadata={"format": "pt"})
    path.with_name("changed").replace(path)


def test_another_models_weights_in_the_models_folder_are_refused(
    own_model: ExtractionRun, tiny_llama: Path
):
    folder = Path(load_manifest(own_model.manifest)["path"])
    (folder / "model.safetensors").unlink()
    shutil.copy(tiny_llama / "model.safetensors", folder)
    assert "the model is not the one that this run was made with" in refused(own_model).what


def test_another_model_that_is_staged_later_is_refused_by_its_content(
    own_model: ExtractionRun, tiny_llama: Path
):
    manifest = load_manifest(own_model.manifest)
    write_json(own_model.manifest, {**manifest, "content_sha256": "f" * 64})
    assert "these samples are another model's answers" in refused(own_model).what


def test_weights_that_differ_in_one_layer_are_caught_by_the_answers_log_probabilities(
    own_model: ExtractionRun,
):
    """Names and sizes are the manifest's, and nobody reads all of the weights again: what answered was another model."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if "layers.14" in name:
                weight *= 1.2

    change_weights(Path(load_manifest(own_model.manifest)["path"]), change)
    error = refused(own_model)
    assert "the captured model is not the one that answered" in error.what
    assert "nats apart" in error.seen


def test_ids_that_are_shifted_by_one_place_are_caught_by_the_answers_log_probabilities(
    own_model: ExtractionRun,
):
    def shift(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"input_ids": [1, *row["input_ids"][:-1]]} for row in rows]

    rewrite(own_model.tokenized, shift)
    assert "the captured model is not the one that answered" in refused(own_model).what


def test_ids_of_another_vocabulary_are_caught_in_a_shard_that_has_no_log_probabilities(
    sound: Served,
):
    shard = Shard(sound.run)
    before = shard.tokenized.read_bytes()
    rewrite(
        shard.tokenized,
        lambda rows: [row | {"input_ids": [i + 1 for i in row["input_ids"]]} for row in rows],
    )
    try:
        with pytest.raises(StepError, match="does not find its own answer likely"):
            sound.extract()
        assert sound.files() == set()
    finally:
        shard.tokenized.write_bytes(before)
        approve(shard)
