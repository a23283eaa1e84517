"""Shards as a real model makes them: its tokenizer and template, its stop token, rows judged by the code that generates.

Only the answers' words are ours: varied sentences, no two answers alike.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebuild.audit.target import Target, load_target
from rebuild.generate.answers import Judge, rendered_prompt
from rebuild.generate.conversation import Conversation, begin_conversation
from rebuild.tables import GENERATED, PROMPTS, TableWriter
from rebuild.tokens.chat import render_prompt, to_chat_messages
from tests.support.conversations import WEATHER, call, row
from tests.support.shards import METADATA, Row, Shard

NOUNS = [
    *("harbour", "kettle", "glacier", "violin", "ledger", "orchard", "turbine", "compass"),
    *("lantern", "quarry", "meadow", "lattice", "pendulum", "archive", "ferry", "granite"),
    *("needle", "parliament", "reservoir", "saddle", "telescope", "umbrella", "vineyard"),
    *("windmill", "zipper", "anchor", "bakery", "canyon", "dynamo", "easel", "furnace"),
    *("gallery", "hinge", "island", "jigsaw", "kiln", "lighthouse", "monsoon", "notebook"),
    *("observatory", "pebble", "quilt", "ribbon", "sundial", "tunnel", "valve", "workshop"),
    *("yarn", "almanac", "barrel", "chimney", "drawbridge", "estuary", "fossil", "greenhouse"),
]
VERBS = [
    *("measures", "borrows", "repairs", "follows", "ignores", "crosses", "divides", "gathers"),
    *("lowers", "paints", "questions", "raises", "shelters", "signals", "steadies", "trades"),
    *("warms", "weighs", "answers", "buries", "carries", "doubles", "empties", "frames"),
]
QUALITIES = [
    *("amber", "brittle", "careful", "distant", "early", "fragile", "gentle", "hollow", "idle"),
    *("jagged", "keen", "leaning", "modest", "narrow", "oblique", "patient", "quiet", "rusty"),
    *("slender", "tidal", "uneven", "velvet", "wary", "yielding", "blunt", "crooked", "damp"),
    *("exact", "frozen", "grey"),
]
PATTERNS = (
    "The {q} {n} {v} every {n} near the {q2} {n2}.",
    "In {year}, a {q} {n2} stood where the {n} is now.",
    "Nobody {v} a {n} without first asking the {q} {n2} about {year}.",
    "Of {few} people, only one {v} the {n}; the others prefer a {q} {n2}.",
    "Why it {v} the {n2} has less to do with the {q} {n} than with {q2} weather.",
    "{Q} as it is, the {n} {v} the {n2} within {few} days.",
    "Then the {n2}, {q} and {q2}, {v} what the {n} left behind.",
    "A {n} costs {few} coins, while any {n2} {v} for free.",
    "Between the {n} and the {n2} lies a {q} mile that {v} the light.",
    "She {v} the {n}, he keeps the {q} {n2}, and both remember {year}.",
    "What {v} a {q} {n} also {v2} the {n2}, though seldom before noon.",
    "If the {n2} {v}, close the {q} {n} and wait {few} minutes.",
)
REQUESTS = (
    "Tell me about the {q} {n} and its {n2}.",
    "How would a {n} get on with a {q} {n2} in {year}?",
    "Compare {few} kinds of {n} for somebody with a {q} {n2}.",
    "Write a note to a {n2} whose {n} has grown {q}.",
)


@dataclass(frozen=True)
class Said:
    """What a model samples in one go: its text, whether the token limit cut it, and what a server parses as its calls."""

    text: str
    cut: bool = False
    calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Speaker:
    """A target model, whether its answers begin with a thought, and what opens it (nothing where the prompt does)."""

    target: Target
    thinks: bool
    opening: str = "<think>\n"

    @property
    def judge(self) -> Judge:
        return self.target.judge

    @property
    def stop_id(self) -> int:
        return int(self.judge.tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, special tokens in it included."""
        return list(self.judge.tokenizer.encode(text, add_special_tokens=False))

    def render(self, messages: list[Row], tools: str | None, **arguments: Any) -> list[int]:
        """Return the ids of a prompt, with other template arguments than the target's if given."""
        return render_prompt(
            self.judge.tokenizer,
            to_chat_messages(messages),
            json.loads(tools) if tools else None,
            self.target.template_kwargs | arguments,
        )

    def wrapped(self, thought: str, text: str) -> str:
        """Return a whole answer: after a thought where the model thinks."""
        return f"{self.opening}{thought}\n</think>\n\n{text}" if self.thinks else text

    def reply(self, conversation: Conversation, said: Said) -> Row:
        """Return the row of the next generation, as `generate_shard` makes it of the server's reply."""
        prompt = self.render(conversation.history, conversation.tools)
        ids = self.encode(said.text)
        finish = "length" if said.cut else "tool_calls" if said.calls else "stop"
        reasoning, served = None, self.judge.decode(ids)
        if said.calls:  # where tools are offered, servers run with the model's parsers
            reasoning, _, served = served.partition("<tool_call>")[0].rpartition("</think>")
        reply = {
            "choices": [
                {
                    "message": {
                        "content": served,
                        "reasoning_content": reasoning or None,
                        "tool_calls": list(said.calls) or None,
                    },
                    "finish_reason": finish,
                    "prompt_token_ids": prompt,
                    "response_token_ids": ids if said.cut else [*ids, self.stop_id],
                }
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids) + (not said.cut),
            },
        }
        rendered = rendered_prompt(prompt, self.judge, conversation.tools is not None)
        outcome = self.judge.outcome(reply, rendered, lambda: prompt)
        return conversation.skeleton() | outcome | {"attempt": 1, "latency_s": 1.0}


@dataclass(frozen=True)
class Data:
    """Prompts and the generated rows that answer them, in order."""

    prompts: list[Row]
    rows: list[Row]

    def __add__(self, other: "Data") -> "Data":
        return Data(self.prompts + other.prompts, self.rows + other.rows)

    def changed(self, change: Callable[[int, Row], Row], rows: int | None = None) -> "Data":
        """Return the data with the first `rows` rows (all by default) replaced by what `change` makes of them."""
        count = len(self.rows) if rows is None else rows
        made = [change(place, row) for place, row in enumerate(self.rows[:count])]
        return Data(self.prompts, made + self.rows[count:])


def qwen3(folder: Path, **arguments: Any) -> Speaker:
    """Return Qwen3, thinking unless the template's arguments say otherwise."""
    facts = {"eos_token_ids": [151643, 151645], "vocab_size": 151936}
    target = load_target({"path": str(folder), "trust_remote_code": False} | facts, arguments)
    return Speaker(target, thinks=arguments.get("enable_thinking", True))


def qwen36(folder: Path) -> Speaker:
    """Return Qwen3.6, whose prompts open the thought."""
    facts = {"eos_token_ids": [248044, 248046], "vocab_size": 248320}
    target = load_target({"path": str(folder), "trust_remote_code": False} | facts, {})
    return Speaker(target, thinks=True, opening="")


def smollm2(folder: Path) -> Speaker:
    """Return SmolLM2, which does not think."""
    facts = {"eos_token_ids": [2], "vocab_size": 49152}
    target = load_target({"path": str(folder), "trust_remote_code": False} | facts, {})
    return Speaker(target, thinks=False)


def phrase(pattern: str, chance: random.Random) -> str:
    """Return a pattern with words put in."""
    nouns, verbs, qualities = (chance.sample(words, 2) for words in (NOUNS, VERBS, QUALITIES))
    words = {"n": nouns[0], "n2": nouns[1], "v": verbs[0], "v2": verbs[1]}
    words |= {"q": qualities[0], "q2": qualities[1], "Q": qualities[0].capitalize()}
    return pattern.format(**words, year=chance.randrange(1200, 2020), few=chance.randrange(2, 90))


def prose(chance: random.Random, sentences: int) -> str:
    """Return that many sentences, in paragraphs of up to four."""
    said = [phrase(chance.choice(PATTERNS), chance) for _ in range(sentences)]
    return "\n\n".join(" ".join(said[start : start + 4]) for start in range(0, sentences, 4))


def question(chance: random.Random) -> str:
    """Return what a user asks, unlike what others ask."""
    return f"{prose(chance, chance.randint(1, 2))} {phrase(chance.choice(REQUESTS), chance)}"


def healthy(speaker: Speaker, chance: random.Random) -> Said:
    """Return an answer of 3 to 25 sentences, after a thought of 2 to 15 where the model thinks."""
    thought = prose(chance, chance.randint(2, 15))
    length = min(25, 3 + round(chance.expovariate(1 / 6)))
    return Said(speaker.wrapped(thought, prose(chance, length)))


def make_prompt(name: str, messages: list[Row], source: str = "letters", **more: Any) -> Row:
    """Return a row of the prompts table."""
    return dict.fromkeys(PROMPTS.names) | {
        "prompt_id": name,
        "source": source,
        "messages": messages,
        **more,
    }


def converse(speaker: Speaker, prompt: Row, answers: list[Said]) -> Data:
    """Return the rows that a prompt unfolds into when these are its answers."""
    conversation, rows = begin_conversation(prompt, keep_reasoning=False), []
    for said in answers:
        answered = speaker.reply(conversation, said)
        rows += [answered, *conversation.accept(answered)]
    return Data([prompt], rows)


def one_turn(speaker: Speaker, name: str, asked: str, said: Said, **more: Any) -> Data:
    """Return a prompt of one question with its answer."""
    return converse(speaker, make_prompt(name, [row("user", asked)], **more), [said])


def clean_data(speaker: Speaker, rows: int, seed: int = 0, name: str = "p") -> Data:
    """Return `rows` questions with healthy answers, of two sources."""
    chance = random.Random(seed)
    data = Data([], [])
    for place in range(rows):
        source = ("letters", "talks")[place % 2]
        data += one_turn(
            speaker, f"{name}{place}", question(chance), healthy(speaker, chance), source=source
        )
    return data


def long_talk(speaker: Speaker, name: str, turns: int, seed: int = 0) -> Data:
    """Return a conversation with a system prompt and several questions, each with a healthy answer."""
    chance = random.Random(f"{name} {seed}")
    asked = [row("user", question(chance)) for _ in range(turns)]
    prompt = make_prompt(name, [row("system", prose(chance, 2)), *asked])
    return converse(speaker, prompt, [healthy(speaker, chance) for _ in range(turns)])


def tool_talk(speaker: Speaker, name: str, seed: int = 0) -> Data:
    """Return a conversation in which the model calls a tool, is told the result, answers, and is asked again."""
    chance = random.Random(f"{name} {seed}")
    city = chance.choice(NOUNS).capitalize()
    made = call("get_weather", json.dumps({"city": city}), "call_1")
    asked = row("user", f"{question(chance)} And how is the weather in {city}?")
    recorded = [
        row("assistant", "", tool_calls=json.dumps([made])),
        row(
            "tool",
            f"{chance.randrange(30)} degrees, {chance.choice(QUALITIES)}",
            tool_call_id="call_1",
        ),
    ]
    messages = [asked, *recorded, row("user", question(chance))]
    prompt = make_prompt(name, messages, tools=json.dumps([WEATHER]))
    text = json.dumps({"name": "get_weather", "arguments": {"city": city}})
    calling = speaker.wrapped(prose(chance, 3), f"<tool_call>\n{text}\n</tool_call>")
    answers = [Said(calling, calls=(made,)), healthy(speaker, chance), healthy(speaker, chance)]
    return converse(speaker, prompt, answers)


def cut_short(speaker: Speaker, name: str, seed: int = 0) -> Data:
    """Return a question whose answer was cut at a token limit, as likely as not in its thought."""
    chance = random.Random(f"{name} {seed}")
    text = healthy(speaker, chance).text
    cut = Said(text[: chance.randrange(len(text) // 4, len(text) * 3 // 4)], cut=True)
    return one_turn(speaker, name, question(chance), cut)


def unanswered(speaker: Speaker, name: str, status: str, error: str) -> Data:
    """Return a question that was given up or skipped."""
    data = one_turn(speaker, name, question(random.Random(name)), Said("Hm."))
    kept = ("sample_id", "prompt_id", "turn", "source", "messages", "tools")
    given_up = dict.fromkeys(GENERATED.names) | {key: data.rows[0][key] for key in kept}
    return Data(data.prompts, [given_up | {"status": status, "error": error, "attempt": 3}])


def write_data(run: Path, data: Data, name: str = "00000", **settings: Any) -> Shard:
    """Write the prompts, generated and tokenized files of a shard; `settings` are tokenize's."""
    shard = Shard(run, name)
    with TableWriter(
        shard.prompts, PROMPTS, {"content_sha256": METADATA["prompts_sha256"]}
    ) as writer:
        writer.write(data.prompts)
    with TableWriter(shard.generated, GENERATED, dict(METADATA)) as writer:
        writer.write(data.rows)
    shard.tokenize(**settings)
    return shard
