"""What is done with a shard or a data set, by us or by others, in a process of its own with a clock around it.

    python benchmarks/data_jobs.py JOB ARGUMENT…

Not counted: starting Python, imports, loading a tokenizer. Counted: from the input file to the output file. One thread
or process does the work where that can be said. Prints one line of JSON: wall and CPU seconds (children included), the
process's peak memory in MB (VmHWM, which a parent's memory cannot reach), and what the job says of itself.
"""

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from measuring import ROOT

PEERS = ROOT / ".cache" / "peers"
BENCH_PEERS = ROOT / ".cache" / "bench-peers"
LONGEST = 8192
FEWEST = 2
SPECFORGE_TEMPLATE = "qwen3-thinking"
# Of a model with next to nothing to compute, whose states are so wide that they would show if they were kept.
WIDE = {"hidden_size": 256}

Told = dict[str, Any]


def measure(work: Callable[[], Told]) -> Told:
    """Do the work; return what it cost and what it says of itself."""
    began, cpu = time.monotonic(), cpu_seconds()
    told = work()
    seconds = {"wall_s": time.monotonic() - began, "cpu_s": cpu_seconds() - cpu}
    return seconds | {"peak_mb": peak_mb()} | told


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and of its children that ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_mb() -> float:
    """Return the most memory that this process held, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def read_parquet(*files: str) -> Told:
    """Read all columns of Parquet files, a batch at a time, with pyarrow alone."""
    import pyarrow.parquet as pq

    def work() -> Told:
        rows = 0
        for file in files:
            with pq.ParquetFile(file, pre_buffer=False) as table:
                rows += sum(len(batch) for batch in table.iter_batches(batch_size=2048))
        return {"rows": rows}

    return measure(work)


def audit_set(path: str, evidence: str, threads: str, model: str = "") -> Told:
    """Audit a data set; a verdict of fail is a result too."""
    from audit_dataset import audit_dataset
    from rebuild.errors import StepError

    def work() -> Told:
        with suppress(StepError):
            audit_dataset(
                Path(path),
                Path(evidence),
                limits={},
                model=Path(model) if model else None,
                threads=int(threads),
            )
        return judged(Path(evidence))

    return measure(work)


def audit_shard(folder: str, model: str) -> Told:
    """Audit the shard `00000` of a run's folder."""
    from audit_shard import audit_shard
    from rebuild.audit.target import load_folder
    from tests.support.shards import Shard

    shard, target = Shard(Path(folder)), load_folder(Path(model))

    def work() -> Told:
        paths = (shard.generated, shard.tokenized, shard.prompts, shard.evidence, shard.digest)
        audit_shard(*paths, shard=shard.name, limits={}, target=target)
        return judged(shard.evidence)

    return measure(work)


def judged(evidence: Path) -> Told:
    """Return the verdict, the rows that were judged and the names of the checks that failed."""
    told = json.loads(evidence.read_text())
    failed = [check["name"] for check in told["checks"] if check["verdict"] == "fail"]
    return {"rows": told["rows"]["tokenized"], "verdict": told["verdict"], "failed": failed}


def tokenize(generated: str, tokenized: str, model: str = "") -> Told:
    """Tokenize a generated shard; with a model's folder, answers without ids get them by its chat template."""
    import pandas  # noqa: F401  # pyarrow would import it with the first array that it makes

    from rebuild.tables import iter_rows, read_metadata
    from tokenize_shard import tokenize_shard

    texts = template_rows(Path(model)) if model else None

    def work() -> Told:
        tokenize_shard(
            Path(generated),
            Path(tokenized),
            max_length=LONGEST,
            min_loss_tokens=FEWEST,
            truncated="keep",
            fingerprint="benchmark",
            texts=texts,
        )
        return {"rows": json.loads(read_metadata(Path(tokenized))["counts"])["out"]}

    return measure(work) | sums(iter_rows(Path(tokenized), ["input_ids", "loss_mask"]))


def template_rows(model: Path) -> Any:
    """Return what gives answers their ids by the chat template, its tokenizer loaded."""
    from rebuild.texts.rows import TextRows
    from rebuild.texts.template_masks import make_template
    from rebuild.tokens.chat import load_tokenizer

    texts = TextRows(model, {}, keep_reasoning=False)
    texts.template = make_template(load_tokenizer(model, False), {})
    return texts


def specforge(conversations: str, folder: str, model: str) -> Told:
    """Have SpecForge build its dataset as its prompt builder does for raw conversations."""
    sys.path.append(str(PEERS))
    from datasets import load_dataset
    from specforge.data.preprocessing import build_eagle3_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    shutil.rmtree(folder, ignore_errors=True)
    made: list[Any] = []

    def work() -> Told:
        rows = load_dataset("json", data_files=conversations, split="train", cache_dir=folder)
        made.append(
            build_eagle3_dataset(
                rows,
                tokenizer,
                chat_template=SPECFORGE_TEMPLATE,
                max_length=LONGEST,
                num_proc=1,
                cache_dir=f"{folder}/built",
                cache_key="built",
                minimum_valid_tokens=FEWEST,
            )
        )
        return {"rows": len(made[0])}

    told = measure(work)
    flat = (
        {name: row[name].reshape(-1).tolist() for name in ("input_ids", "loss_mask")}
        for row in made[0]
    )
    return told | sums(flat)


def speculators(conversations: str, folder: str, model: str, url: str) -> Told:
    """Have speculators prepare its dataset, with the steps and settings of its command `prepare-data`."""
    sys.path.append(str(BENCH_PEERS))
    from speculators.data_generation import preprocessing

    processor = preprocessing.load_processor(model)
    shutil.rmtree(folder, ignore_errors=True)
    made: list[Any] = []

    def work() -> Told:
        rows, _ = preprocessing.load_raw_dataset(conversations)
        rows = rows.shuffle(seed=0)
        made.append(
            preprocessing.build_speculator_training_dataset(
                rows,
                processor,
                max_length=LONGEST,
                num_proc=1,
                render_endpoint=url,
                minimum_valid_tokens=FEWEST,
            )
        )
        made[0].save_to_disk(folder)
        return {"rows": len(made[0])}

    told = measure(work)
    flat = ({name: row[name].tolist() for name in ("input_ids", "loss_mask")} for row in made[0])
    return told | sums(flat)


def sums(rows: Iterable[Told]) -> Told:
    """Return how many ids and how many supervised ones the rows have: what shows that all did the same work."""
    ids = supervised = 0
    for row in rows:
        ids += len(row["input_ids"])
        supervised += sum(row["loss_mask"])
    return {"ids": ids, "supervised": supervised}


def write_run(path: str, *lengths: str) -> Told:
    """Write a run with a small random model, and a tokenized shard of samples of these lengths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support import tiny_states

    folder = Path(path)

    def work() -> Told:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**tiny_states.PLAIN | WIDE))
        model.save_pretrained(folder / "model")
        tiny_states.write_manifest(folder / "model.json", folder / "model")
        rows = [
            tiny_states.tokenized_row(f"p{number:06d}_gen0", int(length))
            for number, length in enumerate(lengths)
        ]
        tiny_states.write_tokenized(folder / "tokenized" / "00000.parquet", rows)
        return {"rows": len(rows)}

    return measure(work)


def extract(path: str) -> Told:
    """Extract the states of the shard of such a run."""
    from extract_hidden_states import extract_hidden_states
    from rebuild.tables import read_metadata
    from tests.support.tiny_states import ExtractionRun

    run = ExtractionRun(Path(path), Path(path) / "model.json")
    arguments = run.arguments()

    def work() -> Told:
        extract_hidden_states(**arguments)
        files = list(run.states.glob("*.ckpt"))
        return {"rows": len(files), "bytes": int(read_metadata(run.index)["bytes"])}

    return measure(work)


JOBS: dict[str, Callable[..., Told]] = {
    "read": read_parquet,
    "audit-set": audit_set,
    "audit-shard": audit_shard,
    "tokenize": tokenize,
    "specforge": specforge,
    "speculators": speculators,
    "write-run": write_run,
    "extract": extract,
}

if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](*sys.argv[2:])))
