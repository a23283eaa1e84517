"""After any death of driver, job or server a resumed run ends with the answers of an undisturbed one."""

from pathlib import Path

from tests.faults.kill_matrix import VICTIMS, run_matrix


def test_killed_and_resumed_a_shard_is_what_it_would_have_been(demo_model: Path, tmp_path: Path):
    """The short form, each process by each signal once; `make bench-faults` kills a hundred times."""
    _, killed = run_matrix(demo_model, tmp_path, kills=6, seed=7)
    assert killed.problems == []
    assert killed.seen["finished and compared"] >= 1
    deaths = [f"{name} {kind}" for name in VICTIMS for kind in ("SIGKILL", "SIGTERM")]
    assert sum(killed.seen[death] for death in deaths) >= 4
