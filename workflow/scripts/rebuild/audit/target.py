"""The target model as the audit knows it: what it would have been asked, and what its ids say."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rebuild.errors import StepError
from rebuild.generate.answers import Judge, decodes_to, said_ids
from rebuild.tokens.chat import (
    THINK_END,
    THINK_START,
    UnrenderableError,
    load_tokenizer,
    render_prompt,
    stop_ids,
    to_chat_messages,
    token_id,
)

PROBE = [{"role": "user", "content": "?"}]
SWITCH = "enable_thinking"  # the name that Qwen's, GLM's and others' chat templates give it

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Tokenizer, chat template and vocabulary of the model that a data set is of.

    `markers` are the tokens that hold a conversation together, by id; none of them belongs into an answer.
    """

    judge: Judge
    template_kwargs: dict[str, Any]
    vocab_size: int
    markers: dict[int, str]
    thinks_by_default: bool

    def difference(self, row: Row) -> str:
        """Return how a generated row's prompt ids differ from what its messages render to, "" where they do not."""
        tools = orjson.loads(row["tools"]) if row["tools"] else None
        try:
            ids = render_prompt(
                self.judge.tokenizer,
                to_chat_messages(row["messages"]),
                tools,
                self.template_kwargs,
            )
        except UnrenderableError as error:
            return f"its messages cannot be rendered: {error}"
        seen = row["prompt_token_ids"]
        if ids == seen:
            return ""
        pairs = enumerate(zip(ids, seen, strict=False))
        place = next((n for n, (own, other) in pairs if own != other), min(len(ids), len(seen)))
        return (
            f"{len(seen)} ids instead of {len(ids)}, different from id {place} on: "
            f"{self.text(seen[place : place + 8])!r} instead of {self.text(ids[place : place + 8])!r}"
        )

    def text(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        known = [token for token in ids if 0 <= token < self.vocab_size]
        return str(self.judge.tokenizer.decode(known))

    def says_otherwise(self, row: Row) -> bool:
        """Whether a generated row's response ids decode to another text than its reasoning and content."""
        said = self.judge.decode([i for i in said_ids(row) if 0 <= i < self.vocab_size])
        served = dict(row, reasoning=row["reasoning"] or "")
        return not decodes_to(said, served, offers_tools=bool(row["tools"]))

    def stray_marker(self, row: Row) -> str:
        """Return the first marker of a conversation inside a generated row's answer, "" for none.

        An answer may open and close one thought; whatever else structures conversations does not belong to it, neither
        as a token nor spelled out in what is said after the thought.
        """
        ids = said_ids(row)
        thoughts = [self.judge.think_start_id, self.judge.think_end_id]
        allowed = {token: 1 for token in thoughts if token is not None}
        for token in ids:
            if token not in self.markers:
                continue
            if not allowed.get(token):
                return f"token {self.markers[token]}"
            allowed[token] -= 1
        content = row["content"] or ""
        return next((f"text {text}" for text in self.markers.values() if text in content), "")

    def thinks(self, row: Row) -> bool:
        """Whether a generated row's answer should begin with a thought."""
        return self.thinks_by_default or self.judge.thought_open(row["prompt_token_ids"])


def load_target(model: dict[str, Any], template_kwargs: dict[str, Any]) -> Target:
    """Return the target of a model's manifest (path, trust_remote_code, eos_token_ids, vocab_size).

    Raises:
        StepError: its tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(Path(model["path"]), model["trust_remote_code"])
    stops = stop_ids(tokenizer, model["eos_token_ids"])
    judge = Judge(
        tokenizer, stops, token_id(tokenizer, THINK_START), token_id(tokenizer, THINK_END)
    )
    kwargs = dict(template_kwargs)
    return Target(
        judge,
        kwargs,
        max(model["vocab_size"], len(tokenizer)),
        conversation_markers(tokenizer, judge),
        thinks_by_default=has_thinking_switched_on(judge, kwargs),
    )


def load_folder(folder: Path) -> Target:
    """Return the target of a model's folder, of which no more than the tokenizer's files need to be there.

    Raises:
        StepError: its tokenizer cannot be loaded.
    """
    if (
        not (folder / "tokenizer.json").is_file()
        and not (folder / "tokenizer_config.json").is_file()
    ):
        raise StepError(
            "there is no tokenizer in this folder",
            where=str(folder),
            expected="a local folder with tokenizer.json and tokenizer_config.json",
            seen="neither" if folder.is_dir() else "no folder",
            remedy="name the folder of the model that the data set is of: dataset_model=FOLDER",
        )
    facts = {"path": str(folder), "trust_remote_code": False, "eos_token_ids": [], "vocab_size": 0}
    return load_target(facts, {})


def conversation_markers(tokenizer: Any, judge: Judge) -> dict[int, str]:
    """Return the special tokens of a vocabulary, its thinking tags and its stop tokens, by id."""
    special = {
        int(token): added.content
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special
    }
    others = [*judge.stop_ids, judge.think_start_id, judge.think_end_id]
    known = {token for token in others if token is not None}
    return special | {token: tokenizer.convert_ids_to_tokens(token) for token in known}


def has_thinking_switched_on(judge: Judge, template_kwargs: dict[str, Any]) -> bool:
    """Whether the template has a switch for thinking that is on; a thought that it opens itself is seen in the ids."""
    if judge.think_start_id is None:
        return False
    off = template_kwargs | {SWITCH: False}
    on, without = (
        render_prompt(judge.tokenizer, PROBE, None, kwargs) for kwargs in (template_kwargs, off)
    )
    return on != without
