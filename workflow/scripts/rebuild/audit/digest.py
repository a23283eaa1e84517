"""The few numbers of each row from which sets of any size are judged: lengths, hashes, sketches.

About 200 bytes a row, so that a million rows are judged in memory; written beside a shard's evidence for the run's.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from rebuild.audit.facts import ANSWERED, Facts
from rebuild.audit.near_duplicates import BINS, EMPTY, Sketches
from rebuild.errors import StepError
from rebuild.tables import open_parquet

NAME = pa.dictionary(pa.int32(), pa.string())
SKETCH = pa.binary(4 * BINS)

# trained: it is a training row. whole: nothing cut it short. Numbers that are not known are -1, hashes 0, texts null.
# context_key (of what is ahead of the answer) and sketch are there for the first row of each prompt alone.
DIGEST = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", NAME),
        ("status", NAME),
        ("finish_reason", NAME),
        ("trained", pa.bool_()),
        ("whole", pa.bool_()),
        ("mask_sum", pa.int32()),
        ("seq_len", pa.int32()),
        ("prompt_tokens", pa.int32()),
        ("answer_tokens", pa.int32()),
        ("reasoning_tokens", pa.int32()),
        ("prompt_key", pa.uint64()),
        ("answer_key", pa.uint64()),
        ("context_key", pa.uint64()),
        ("before_id", pa.int32()),
        ("sketch", SKETCH),
        ("excerpt", pa.string()),
    ]
)


def make_digest(facts: Facts) -> pa.Table:
    """Return the digest of a set: a row for each generated row, or for each training row where only those are known."""
    generated = "completion_tokens" in facts.answers
    rows = facts.answers if generated else beside(facts.samples, facts.answers)
    if rows.empty:
        return DIGEST.empty_table()
    samples = facts.samples
    if generated:
        samples = samples.drop_duplicates("sample_id").set_index("sample_id")
        samples = samples.astype({"answer_key": "UInt64"})  # beside gaps it would become a float
        samples = samples.reindex(rows["sample_id"])
    frame = pd.DataFrame({"sample_id": rows["sample_id"].to_numpy()})
    frame["trained"] = samples["mask_sum"].notna().to_numpy()
    for name, missing in {"mask_sum": -1, "seq_len": -1, "before_id": -1, "answer_key": 0}.items():
        frame[name] = samples[name].fillna(missing).to_numpy()
    for name in ["source", "status", "finish_reason", "excerpt"]:
        frame[name] = rows[name].to_numpy() if name in rows else None
    frame["whole"] = is_whole(frame, facts.max_length)
    frame = frame.assign(**token_counts(rows))
    frame["prompt_key"] = prompt_keys(rows)
    frame["sketch"] = row_sketches(rows, facts)
    frame["context_key"] = 0 if generated else rows["context_key"].to_numpy()
    if not generated and has_prompt_ids(rows):
        again = frame["prompt_key"].duplicated()
        frame.loc[again, "context_key"] = 0
        frame.loc[again, "sketch"] = None
    columns = [pa.array(frame[f.name], type=f.type, from_pandas=True) for f in DIGEST]
    return pa.table(columns, schema=DIGEST)


def beside(samples: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """Return training rows with what is known of their answers, row by row, in further columns."""
    more = [name for name in answers.columns if name not in samples.columns]
    return pd.concat([samples, answers[more]], axis=1)


def is_whole(frame: pd.DataFrame, max_length: int | None) -> "pd.Series[bool]":
    """Tell which training rows are as long as they wanted to be: neither truncated nor cut to `max_length`."""
    longest = np.inf if max_length is None else max_length
    cut = (frame["finish_reason"] == "length").fillna(False) | (frame["seq_len"] >= longest)
    return frame["trained"] & ~cut.astype(bool)


def token_counts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return prompt, answer and reasoning tokens: as the engine counts them, else as the mask does."""
    if "completion_tokens" in rows:
        thought = rows["reasoning_tokens"].clip(lower=0)
        answered = rows["status"].isin(ANSWERED)
        said = (rows["completion_tokens"] - thought).where(rows["completion_tokens"] >= 0, -1)
        return {
            "prompt_tokens": rows["prompt_tokens"].to_numpy(),
            "answer_tokens": said.where(answered, -1).to_numpy(),
            "reasoning_tokens": rows["reasoning_tokens"].where(answered, -1).to_numpy(),
        }
    return {
        "prompt_tokens": (rows["ids_len"] - rows["mask_sum"]).to_numpy(),
        "answer_tokens": rows["mask_sum"].to_numpy(),
        "reasoning_tokens": np.full(len(rows), -1),
    }


def prompt_keys(rows: pd.DataFrame) -> NDArray[np.uint64]:
    """Return a hash that is the same for rows of the same prompt: of its id, else of what comes ahead of the answer."""
    if has_prompt_ids(rows):
        return pd.util.hash_array(rows["prompt_id"].fillna("").to_numpy(dtype=object))
    return rows["context_key"].to_numpy(dtype=np.uint64)


def has_prompt_ids(rows: pd.DataFrame) -> bool:
    """Whether every row says which prompt it answers."""
    return "prompt_id" in rows and bool(rows["prompt_id"].notna().all())


def row_sketches(rows: pd.DataFrame, facts: Facts) -> list[bytes | None]:
    """Return the sketch of each prompt at its first row, None at the others."""
    if facts.sketches is None:
        return [None] * len(rows)
    packed = [None if (s == EMPTY).all() else s.tobytes() for s in facts.sketches]
    if not facts.prompts:
        return packed
    left = dict(zip(facts.prompts, packed, strict=True))
    return [left.pop(prompt, None) for prompt in rows["prompt_id"]]


def unpack_sketches(column: Any) -> tuple[Sketches, NDArray[np.int64]]:
    """Return the sketches of a digest [n, 16] and the rows that they are of."""
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    raw = b"".join(column.drop_null().to_pylist())
    return np.frombuffer(raw, dtype=np.uint32).reshape(-1, BINS), rows


def read_digest(path: Path) -> pa.Table:
    """Return the digest that an audit wrote.

    Raises:
        StepError: it cannot be read, or is of another version.
    """
    file = open_parquet(path)
    if file.schema_arrow.names != DIGEST.names:
        raise StepError(
            "the digest of a shard is of another version",
            where=str(path),
            expected=f"the columns {', '.join(DIGEST.names)}",
            seen=", ".join(file.schema_arrow.names),
            remedy=f"have the shard audited again: rm {path}",
        )
    return file.read()


def numbers(digest: pa.Table, name: str) -> NDArray[Any]:
    """Return a column of numbers or flags."""
    values: NDArray[Any] = digest[name].to_numpy()
    return values
