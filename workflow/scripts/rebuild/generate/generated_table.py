"""The generated table of a shard, built from the log of finished answers."""

import json
from collections import Counter
from pathlib import Path

from rebuild.errors import StepError
from rebuild.generate.conversation import replay
from rebuild.generate.partial_log import PartialLog
from rebuild.tables import GENERATED, TableWriter, iter_rows


def write_generated(
    path: Path,
    prompts: Path,
    log: PartialLog,
    metadata: dict[str, str],
    *,
    keep_reasoning: bool,
) -> Counter[str]:
    """Write the shard's table from the log, in prompt order, and return the rows by status.

    Raises:
        StepError: a prompt without all its rows.
    """
    statuses: Counter[str] = Counter()
    with TableWriter(path, GENERATED, metadata) as writer:
        for prompt in iter_rows(prompts):
            conversation, rows = replay(prompt, log.rows_of(prompt["prompt_id"]), keep_reasoning)
            if not conversation.finished:
                raise StepError(
                    "the log of finished answers is incomplete",
                    where=f"prompt {prompt['prompt_id']}, turn {conversation.turn}, in {log.path}",
                    expected="a row for every turn of every prompt",
                    seen=f"{len(rows)} rows",
                    remedy="run again: the missing turns are asked for, the others are kept",
                )
            writer.write(rows)
            statuses.update(row["status"] for row in rows)
        writer.metadata["statuses"] = json.dumps(dict(sorted(statuses.items())))
    return statuses
