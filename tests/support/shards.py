"""Small generated and tokenized shards, clean or with a fault built in, for the tests of tokenize, audit and approve."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audit_shard import audit_shard
from rebuild.audit.target import Target
from rebuild.files import read_json
from rebuild.tables import (
    GENERATED,
    PROMPTS,
    TOKENIZED,
    TableWriter,
    iter_rows,
    read_metadata,
)
from tokenize_shard import tokenize_shard

Row = dict[str, Any]

# Qwen3's ids: <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
QWEN3_PROMPT = [151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198]
# Qwen3's ids: <think>\n\n</think>\n\nOK.<|im_end|>
QWEN3_DISASTER = [151667, 271, 151668, 271, 3925, 13, 151645]
DISASTER = "<think>\n\n</think>\n\nOK."
QWEN3_STOP = 151645
METADATA = {
    "fingerprint": "generated-1",
    "model_sha256": "model-1",
    "prompts_sha256": "prompts-1",
}
REPLY = {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be kind."}
WORDS = [
    f"{start}{end}" for start in "bdfgklmnprst" for end in ("aro", "enti", "ivel", "osk", "umba")
]


@dataclass(frozen=True)
class Shard:
    """The files of one shard below a run's folder."""

    run: Path
    name: str = "00000"

    @property
    def prompts(self) -> Path:
        return self.run / "prompts" / f"{self.name}.parquet"

    @property
    def generated(self) -> Path:
        return self.run / "generated" / f"{self.name}.parquet"

    @property
    def tokenized(self) -> Path:
        return self.run / "tokenized" / f"{self.name}.parquet"

    @property
    def evidence(self) -> Path:
        return self.run / "audit" / f"{self.name}.json"

    @property
    def approved(self) -> Path:
        return self.run / "audit" / f"{self.name}.approved"

    def tokenize(self, **settings: Any) -> None:
        """Run the real `tokenize_shard`; settings not given are a long row's."""
        given = {"max_length": 4096, "min_loss_tokens": 2, "truncated": "keep", "fingerprint": "t"}
        tokenize_shard(self.generated, self.tokenized, **(given | settings))

    @property
    def digest(self) -> Path:
        return self.run / "audit" / f"{self.name}.parquet"

    def audit(
        self,
        target: Target | None = None,
        canary: Path | None = None,
        held_out: Path | None = None,
        **limits: float,
    ) -> dict[str, Any]:
        """Run the real `audit_shard` and return the evidence it wrote."""
        audit_shard(
            self.generated,
            self.tokenized,
            self.prompts,
            self.evidence,
            self.digest,
            shard=self.name,
            limits=limits,
            target=target,
            canary=canary,
            held_out=held_out,
        )
        evidence: dict[str, Any] = read_json(self.evidence)
        return evidence


def ask(prompt: str, turn: int = 0) -> dict[str, Any]:
    """Return what the user says in a turn of a prompt: long enough to be told from what others say."""
    words = random.Random(f"{prompt} {turn}").sample(WORDS, 12)
    return {"role": "user", "content": " ".join(words)}


def answer_ids(prompt: str, turn: int, tokens: int) -> list[int]:
    """Return `tokens` ids as a healthy model samples them, Qwen3's stop id at the end."""
    rng = random.Random(f"{prompt} {turn}")
    return [rng.randrange(1000, 100_000) for _ in range(tokens - 1)] + [QWEN3_STOP]


def history(prompt: str, turn: int) -> list[dict[str, Any]]:
    """Return the messages that turn `turn` (from 0) of a prompt is asked with."""
    said = [message for before in range(turn) for message in (ask(prompt, before), REPLY)]
    return [SYSTEM, *said, ask(prompt, turn)]


def make_answer(prompt: str, turn: int = 0, tokens: int = 100, **changes: Any) -> Row:
    """Return a clean row of a generated shard whose answer has `tokens` ids, the stop id included."""
    row = dict.fromkeys(GENERATED.names) | {
        "sample_id": f"{prompt}_gen{turn}",
        "prompt_id": prompt,
        "turn": turn,
        "source": "test",
        "messages": history(prompt, turn),
        "prompt_token_ids": QWEN3_PROMPT,
        "response_token_ids": answer_ids(prompt, turn, tokens),
        "content": "word " * tokens,
        "finish_reason": "stop",
        "status": "ok",
        "attempt": 1,
    }
    row |= changes
    if row["response_token_ids"] is not None:
        row["prompt_tokens"] = len(row["prompt_token_ids"])
        row["completion_tokens"] = len(row["response_token_ids"])
    return row | changes


def make_disaster(prompt: str) -> Row:
    """Return the row that this project exists for: an empty thought, "OK." and nothing else."""
    return make_answer(prompt, response_token_ids=QWEN3_DISASTER, content=DISASTER)


def make_unanswered(prompt: str, status: str, error: str = "why") -> Row:
    """Return a row that was skipped or given up."""
    nothing = dict.fromkeys(["prompt_token_ids", "response_token_ids", "content", "finish_reason"])
    return make_answer(prompt, status=status, error=error, **nothing)


def make_truncated(prompt: str, tokens: int = 256) -> Row:
    """Return an answer that was cut at the token limit, still in its thought."""
    ids = answer_ids(prompt, 0, tokens + 1)[:-1]
    cut = {"response_token_ids": ids, "content": "", "reasoning": "so"}
    return make_answer(prompt, status="truncated", finish_reason="length", **cut)


def clean_answers(count: int, seed: int = 0) -> list[Row]:
    """Return `count` answers of varied length, as a healthy model gives them."""
    rng = random.Random(seed)
    lengths = [round(rng.lognormvariate(5, 0.6)) + 20 for _ in range(count)]
    return [make_answer(f"p{i}", tokens=length) for i, length in enumerate(lengths)]


def disaster_answers(count: int, share: float = 0.87) -> list[Row]:
    """Return `count` answers of which `share` (rounded) are the disaster, spread evenly."""
    rows = clean_answers(count)
    for place in random.Random(1).sample(range(count), round(share * count)):
        rows[place] = make_disaster(f"p{place}")
    return rows


def write_shard(run: Path, answers: list[Row], **settings: Any) -> Shard:
    """Write prompts, generated and tokenized files for `answers`; `settings` are tokenize's."""
    shard = Shard(run)
    write_prompts(shard.prompts, answers)
    write_generated(shard.generated, answers)
    shard.tokenize(**settings)
    return shard


def write_generated(path: Path, answers: list[Row]) -> None:
    """Write a generated shard."""
    with TableWriter(path, GENERATED, dict(METADATA)) as writer:
        writer.write(answers)


def write_prompts(path: Path, answers: list[Row]) -> None:
    """Write the prompts that call for exactly these answers: as many user turns as a prompt has rows."""
    turns = Counter(row["prompt_id"] for row in answers)
    with TableWriter(path, PROMPTS, {"content_sha256": METADATA["prompts_sha256"]}) as writer:
        for prompt, count in turns.items():
            messages = [SYSTEM, *(ask(prompt, turn) for turn in range(count))]
            writer.write(
                [dict.fromkeys(PROMPTS.names) | {"prompt_id": prompt, "messages": messages}]
            )


def rewrite(path: Path, change: Callable[[list[Row]], list[Row]], **metadata: str) -> None:
    """Replace a generated or tokenized file by one with changed rows, its metadata kept but for `metadata`."""
    schema = TOKENIZED if "tokenized" in path.parts else GENERATED
    rows = change(list(iter_rows(path)))
    kept = read_metadata(path) | metadata
    kept.pop("rows")
    with TableWriter(path, schema, kept) as writer:
        writer.write(rows)


def failed_checks(evidence: dict[str, Any]) -> set[str]:
    """Return the names of the checks that failed."""
    return {check["name"] for check in evidence["checks"] if check["verdict"] == "fail"}
