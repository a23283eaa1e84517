"""Ids for those rows of a generated shard that came without any, from their texts by the model's chat template.

The tokenizer, and the slow library that it is in, is loaded when the first such row comes.
"""

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rebuild.model.manifest import ensure_model, load_manifest
from rebuild.step import say
from rebuild.tokens.masks import list_lengths

ANSWERED = ("ok", "tool_calls", "truncated")
UNSTABLE = "unstable_template"
TEXTS = ["messages", "tools", "reasoning", "content", "tool_calls"]
ROW = ["sample_id", "finish_reason", "status"]
NAMED_AT_MOST = 5


class TextRows:
    """Fills in ids, batch by batch, and remembers which rows the template does not render as they were, and why."""

    def __init__(
        self, model_manifest: Path, chat_template_kwargs: dict[str, Any], *, keep_reasoning: bool
    ) -> None:
        self.model_manifest = model_manifest
        self.chat_template_kwargs = chat_template_kwargs
        self.keep_reasoning = keep_reasoning
        self.rows = 0
        self.injected_rows = 0
        self.reasons: Counter[str] = Counter()
        self.named: list[str] = []

    @cached_property
    def template(self) -> Any:
        """The model's chat template."""
        from rebuild.texts.template_masks import make_template
        from rebuild.tokens.chat import load_tokenizer, template_arguments

        model = load_manifest(self.model_manifest)
        folder = ensure_model(self.model_manifest)
        tokenizer = load_tokenizer(folder, model["trust_remote_code"])
        arguments = template_arguments(
            self.chat_template_kwargs, keep_reasoning=self.keep_reasoning
        )
        return make_template(tokenizer, arguments, model["eos_token_ids"])

    @cached_property
    def injected(self) -> str:
        """What the template writes ahead of a conversation without a system message, empty if nothing."""
        from rebuild.texts.template_masks import injected_system

        return injected_system(self.template)

    def fill(self, batch: Any) -> Any:
        """Return the batch with ids in every row and its `mask_origin`.

        A row that the template does not render as it was gets the status `UNSTABLE` and no ids.
        """
        lacking = without_ids(batch)
        batch = with_origin(batch, lacking)
        if not lacking.any():
            return batch
        found = self.ids_of(batch.filter(pa.array(lacking)).select([*TEXTS, *ROW]).to_pylist())
        batch = with_ids(batch, lacking, found)
        unstable = lacking.copy()
        unstable[lacking] = [ids is None for ids in found]
        status = pc.if_else(pa.array(unstable), UNSTABLE, batch["status"])
        return batch.set_column(batch.schema.get_field_index("status"), "status", status)

    def ids_of(self, rows: list[dict[str, Any]]) -> list[Any]:
        """Return the ids of rows, None where the template does not render one as it was."""
        from rebuild.texts.template_checks import UnstableError
        from rebuild.texts.template_masks import template_ids

        self.rows += len(rows)
        if self.injected:
            self.injected_rows += sum(not begins_with_system(row) for row in rows)
        found: list[Any] = template_ids(rows, self.template)
        for row, ids in zip(rows, found, strict=True):
            if isinstance(ids, UnstableError):
                self.reasons[ids.reason] += 1
                self.named += [f"{row['sample_id']}: {ids}"]
        del self.named[NAMED_AT_MOST:]
        return [None if isinstance(ids, UnstableError) else ids for ids in found]

    def facts(self) -> dict[str, Any]:
        """Return for the file's metadata how many rows took this path, why some were refused, and what was injected."""
        system = {"text": self.injected, "rows": self.injected_rows} if self.injected_rows else None
        return {"rows": self.rows, "unstable": dict(self.reasons), "injected_system": system}

    def report(self) -> None:
        """Write to the log what a person should know of these rows."""
        if not self.rows:
            return
        refused = self.reasons.total()
        say(f"{self.rows} answers came without ids: {refused} dropped, the others by the template")
        if self.injected_rows:
            say(
                f"the template puts a system prompt that no message holds ahead of {self.injected_rows} of them, as the "
                f"server did if it used this template: {self.injected!r}"
            )
        for line in self.named:
            say(f"dropped, the template does not render it as it was: {line}")
        if refused > len(self.named):
            say(f"… and {refused - len(self.named)} more; by reason: {dict(self.reasons)}")


def begins_with_system(row: dict[str, Any]) -> bool:
    """Whether a row's conversation has a system message of its own."""
    return bool(row["messages"]) and row["messages"][0]["role"] == "system"


def without_ids(batch: Any) -> NDArray[np.bool_]:
    """Return which answered rows hold ids neither of their prompt nor of their response."""
    status = batch["status"].to_numpy(zero_copy_only=False)
    lengths = [list_lengths(batch[f"{part}_token_ids"]) for part in ("prompt", "response")]
    return np.asarray(np.isin(status, ANSWERED) & (sum(lengths) == 0))


def with_origin(batch: Any, lacking: NDArray[np.bool_] | None = None) -> Any:
    """Return the batch with the column that says where each row's ids are from: the template for the lacking ones."""
    if lacking is None:
        lacking = np.zeros(len(batch), dtype=bool)
    origins = np.where(lacking, "template", "engine")
    return batch.append_column("mask_origin", pa.array(origins, type=pa.string()))


def with_ids(batch: Any, lacking: NDArray[np.bool_], found: list[Any]) -> Any:
    """Return the batch with the ids found for the lacking rows, in their order."""
    places = np.arange(len(batch))
    places[lacking] = len(batch) + np.arange(len(found))
    for part, name in enumerate(("prompt_token_ids", "response_token_ids")):
        new = pa.array([ids and ids[part] for ids in found], type=batch[name].type)
        whole = pa.concat_arrays([batch[name], new]).take(pa.array(places))
        batch = batch.set_column(batch.schema.get_field_index(name), name, whole)
    return batch
