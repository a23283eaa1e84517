"""A tiny Qwen3.6 that has learnt a few conversations by heart: thoughts end, tools are called, answers stop by themselves.

Its layers, tokenizer and template are those of `qwen36`. What it says is in TALKS, and under the production sampling it
says just that: each token is so certain that no other is within top_p.
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from rebuild.files import read_json, write_json
from tests.support.models import cached_model, qwen36_tokenizer
from tests.support.qwen36 import ATTENTION_EVERY, VOCABULARY

Message = dict[str, Any]
Lesson = tuple[list[int], list[int]]  # ids of a prompt and its answer

LAYERS = 64
SURE = (
    0.99  # least probability of every token that is learnt; the production sampling's top_p is 0.95
)
LONGEST = (
    160  # tokens of an answer that are learnt: what loops would never end; requests ask for fewer
)
IGNORED = -100

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Forecast for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Says:
    """What the model says in one generation: `answer` is None where it never closes its thought.

    `calls` are (name, arguments) of tools, `forever` is repeated without end where it is given.
    """

    thought: str
    answer: str | None = None
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    forever: str = ""

    def text(self) -> str:
        """Return all of it as it is sampled, the stop token included."""
        calls = "\n".join(call_text(*call) for call in self.calls)
        after = "\n\n".join(part for part in (self.answer, calls) if part)
        said = self.thought + ("\n" if self.answer is None else "\n</think>\n\n") + after
        return said + (self.forever * LONGEST or "<|im_end|>")

    def message(self) -> Message:
        """Return it as a message of the history."""
        calls = [{"function": {"name": name, "arguments": given}} for name, given in self.calls]
        return {
            "role": "assistant",
            "content": self.answer or "",
            "reasoning_content": self.thought,
            "tool_calls": calls,
        }


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a tool call as Qwen3.6 writes it."""
    given = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


@dataclass(frozen=True)
class Talk:
    """A row of the prompts file, and what the model says to it, generation by generation."""

    id: str
    messages: list[Message]
    says: list[Says]
    tools: list[dict[str, Any]] | None = None

    def row(self) -> dict[str, Any]:
        """Return the prompt as a line of a prompts file."""
        given = {"id": self.id, "source": "talks", "messages": self.messages}
        return given | ({"tools": self.tools} if self.tools else {})

    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as the server puts them into the prompt: with a field more."""
        return self.tools and [tool | {"defer_loading": None} for tool in self.tools]

    def lessons(self) -> Iterator[tuple[list[Message], str]]:
        """Yield each generation's history, with all thoughts and with results in the order of calls, and what is said then."""
        history: list[Message] = []
        results: list[Message] = []
        saying = iter(self.says)
        following = [message["role"] for message in self.messages[1:]] + [""]
        for message, next_role in zip(self.messages, following, strict=True):
            if message["role"] == "tool":
                results.append(message)
            elif message["role"] != "assistant":  # the model's own call takes that one's place
                history.append(message)
            if message["role"] == "system" or next_role == "tool":
                continue
            said = next(saying, None)
            if said is None:
                return
            history += sorted(results, key=lambda one: str(one["tool_call_id"]))
            results = []
            yield list(history), said.text()
            history.append(said.message())


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def recorded(*calls: tuple[str, dict[str, Any]]) -> Message:
    """Return the recorded message of an assistant that made these calls, as `old_0`, `old_1`, …"""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"old_{n}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for n, (name, given) in enumerate(calls)
        ],
    }


def result(number: int, content: str) -> Message:
    return {"role": "tool", "tool_call_id": f"old_{number}", "content": content}


OSLO, ROME, CAIRO = (
    ("get_weather", {"city": "Oslo", "days": 2}),
    ("get_weather", {"city": "Rome"}),
    ("get_weather", {"city": "Cairo"}),
)

TALKS = [
    Talk(
        "three turns",
        [user("Tell me about otters."), user("What do they eat?"), user("Where do they sleep?")],
        [
            Says(
                "The user wants to know about otters. I should mention that they swim, play and use tools. Keep it short.",
                "Otters are playful animals 🦦 that live by rivers and coasts. They swim well, and some of them use stones as tools.",
            ),
            Says(
                "Now the question is about food. Fish, crabs, mussels, sometimes frogs. A list might be nice here.",
                "They eat:\n\n- fish\n- crabs and mussels\n- now and then a frog",
            ),
            Says(
                "Sleep: sea otters float on their backs and wrap themselves in kelp, river otters use dens called holts.",
                "River otters sleep in dens called holts; sea otters float on their backs, wrapped in kelp.",
            ),
        ],
    ),
    Talk(
        "system prompt",
        [
            {"role": "system", "content": "Answer in one sentence."},
            user("Why is the sky blue?"),
            user("And the evening sky?"),
        ],
        [
            Says(
                "One sentence only. Rayleigh scattering: short waves are scattered more strongly than long ones.",
                "Air scatters blue light more strongly than red light, so blue reaches us from all over the sky.",
            ),
            Says(
                "In the evening the path through the air is long, so that the blue is gone before it arrives.",
                "Its light has come so far through the air that mostly red is left.",
            ),
        ],
    ),
    Talk(
        "known call",
        [
            user("What will the weather be in Oslo?"),
            recorded(OSLO),
            result(0, '{"temp": 4, "sky": "rain"}'),
            user("What should I wear there?"),
        ],
        [
            Says(
                "I need a forecast for Oslo, which the function get_weather can give me, for two days.",
                "",
                (OSLO,),
            ),
            Says(
                "The function says four degrees and rain. I should tell this plainly, and not more.",
                "In Oslo expect rain at about four degrees on both days.",
            ),
            Says(
                "Rain at four degrees: something warm and something that keeps the water out. An umbrella helps.",
                "Take a warm coat that keeps the rain out, good shoes, and perhaps an umbrella.",
            ),
        ],
        [WEATHER],
    ),
    Talk(
        "two known calls",
        [
            user("Is it warmer in Rome or in Cairo?"),
            recorded(ROME, CAIRO),
            result(1, '{"temp": 31}'),
            result(0, '{"temp": 22}'),
        ],
        [
            Says(
                "I have to compare two cities, so that I need two forecasts. I can ask for both at once.",
                "I will look up both cities.",
                (ROME, CAIRO),
            ),
            Says(
                "Rome has twenty-two degrees, Cairo thirty-one. So the answer is Cairo, by nine degrees.",
                "It is warmer in Cairo: thirty-one degrees, against twenty-two in Rome.",
            ),
        ],
        [WEATHER],
    ),
    Talk(
        "unknown call",
        [
            user("Weather for Bergen, please."),
            recorded(("get_weather", {"city": "Bergen"})),
            result(0, '{"temp": 7}'),
            user("And tomorrow?"),
        ],
        [
            Says(
                "Bergen is in Norway. I want to be thorough and ask for the forecast of five days rather than one.",
                "",
                (("get_weather", {"city": "Bergen", "days": 5}),),
            )
        ],
        [WEATHER],
    ),
    Talk(
        "call in an open thought",
        [
            user("Should I take a hat to Cairo?"),
            recorded(CAIRO),
            result(0, '{"temp": 33, "sky": "clear"}'),
        ],
        [
            Says(
                "A hat is useful in strong sun. Let me see what the forecast for Cairo has to say about it.",
                None,
                (CAIRO,),
            ),
            Says(
                "A clear sky and thirty-three degrees. That is a lot of sun, so that a hat is a good idea.",
                "Yes, take a hat: the sky over Cairo is clear, and it has thirty-three degrees.",
            ),
        ],
        [WEATHER],
    ),
    Talk(
        "endless thought",
        [user("How many stars are there?"), user("Are you sure?")],
        [Says("Let me count the stars that I can see.", forever=" There is one, and one more,")],
    ),
    Talk(
        "thought that only stops",
        [user("What is the best colour?")],
        [
            Says(
                "There is no best colour, it depends on taste and use. Some like blue, others green. I cannot "
                "decide this for anybody, and so I will rather say nothing at all."
            )
        ],
    ),
    Talk(
        "endless answer",
        [user("List all even numbers.")],
        [
            Says(
                "There are infinitely many even numbers. I will simply begin, and see how far I can get.",
                "Here they are:",
                forever="\n- and then the next of them",
            )
        ],
    ),
    Talk(
        "blank thought",
        [user("Say something nice.")],
        [
            Says(
                "",
                "The world is better with you in it. Whatever today was like, somebody was glad that you were there, "
                "and tomorrow there will be another one who is.",
            )
        ],
    ),
    Talk(
        "code",
        [user("Reverse a list in Python.")],
        [
            Says(
                "A slice with a negative step is the shortest way. I show it in a code block, and name the method too.",
                "```python\nbackwards = numbers[::-1]\n```\n\nOr in place: `numbers.reverse()`.",
            )
        ],
    ),
    Talk(
        "other scripts",
        [user("Say hello in some languages.")],
        [
            Says(
                "Some languages with other scripts would be nice: Greek, Japanese, Arabic, Hindi. With flags, perhaps.",
                "Καλημέρα 🇬🇷, こんにちは 🇯🇵, مرحبا, नमस्ते – and good day!",
            )
        ],
    ),
    Talk(
        "sum",
        [user("What is 17 + 25?"), user("Minus 2?")],
        [
            Says(
                "Seventeen and twenty-five: ten and twenty are thirty, seven and five are twelve, so forty-two.",
                "17 + 25 = 42.",
            ),
            Says(
                "Forty-two less two is forty. This is easy, but I check it once more: forty and two are forty-two. Yes.",
                "42 - 2 = 40.",
            ),
        ],
    ),
    Talk(
        "haiku",
        [user("A haiku about rain?")],
        [
            Says(
                "Five, seven and five syllables. Rain on a roof, an old cat that listens, and at last the morning sun.",
                "Rain on the tin roof;\nthe old cat listens all night\nfor the sun to speak.",
            )
        ],
    ),
]


def talking_qwen36() -> Path:
    """Return the model's folder (half a minute the first time)."""
    tokenizer = qwen36_tokenizer()
    return cached_model(
        f"talking-{tokenizer.name}",  # another tokenizer is another model
        Path(__file__),
        lambda folder: build_talking_qwen36(folder, tokenizer),
    )


def build_talking_qwen36(folder: Path, tokenizer_of: Path) -> None:
    """Write the model to `folder` (130 MB): random but for its last layer and its head, which are trained until it knows TALKS."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    lessons = encode_lessons(tokenizer)
    words = sorted({token for lesson in lessons for ids in lesson for token in ids})
    place = {word: at for at, word in enumerate(words)}
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(small_config(len(words)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers as small as these are slower on more
    try:
        learn_by_heart(model, [tuple([place[t] for t in ids] for ids in one) for one in lessons])
    finally:
        torch.set_num_threads(threads)
    widen_vocabulary(model, words)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers does not save it, and the server needs it
    saved = read_json(folder / "config.json") | {"full_attention_interval": ATTENTION_EVERY}
    write_json(folder / "config.json", saved)


def small_config(words: int) -> Qwen3_5TextConfig:
    """Return Qwen3.6-27B's configuration with its number of layers, but narrow, and for a vocabulary of `words`."""
    return Qwen3_5TextConfig(
        vocab_size=words,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        full_attention_interval=ATTENTION_EVERY,
        max_position_embeddings=262144,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


def encode_lessons(tokenizer: Any) -> list[Lesson]:
    """Return the ids of every generation's prompt and answer, for a history without thoughts and for one with them."""
    lessons: list[Lesson] = []
    for talk, preserve in itertools.product(TALKS, (False, True)):
        for history, text in talk.lessons():
            prompt = tokenizer.apply_chat_template(
                history,
                tools=talk.shown_tools(),
                add_generation_prompt=True,
                return_dict=False,
                preserve_thinking=preserve,
            )
            lesson = (prompt, tokenizer.encode(text)[:LONGEST])
            if lesson not in lessons:
                lessons.append(lesson)
    return lessons


def learn_by_heart(model: Any, lessons: list[Lesson]) -> None:
    """Train the last layer and the head until every token of every answer has at least the probability SURE."""
    batches = [make_batch(model, one) for one in batched(sorted(lessons, key=length_of))]
    learning = [
        parameter
        for part in (model.model.layers[-1], model.model.norm, model.lm_head)
        for parameter in part.parameters()
    ]
    optimizer = torch.optim.AdamW(learning, lr=5e-3, weight_decay=0)
    least = 0.0
    while least < SURE:
        optimizer.zero_grad()
        least = min(study(model, *batch) for batch in batches)
        torch.nn.utils.clip_grad_norm_(learning, 50.0)
        optimizer.step()


def study(model: Any, states: torch.Tensor, answers: torch.Tensor) -> float:
    """Add one batch's gradients, and return the least probability of an answer's token."""
    positions = torch.arange(states.shape[1]).expand(3, len(states), -1)
    turned = model.model.rotary_emb(states, positions)
    last = model.model.layers[-1](states, position_embeddings=turned, attention_mask=None)
    known = answers != IGNORED
    logits = model.lm_head(model.model.norm(last[known]))
    # all other words of the real vocabulary, whose logits will be 0
    others = torch.full((len(logits), 1), math.log(VOCABULARY - logits.shape[1]))
    surprise = cross_entropy(torch.cat([logits, others], 1), answers[known], reduction="none")
    surprise.sum().backward()
    return math.exp(-float(surprise.detach().max()))


def make_batch(model: Any, lessons: list[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the last layer gets to see, float [B, S, D], and what it is to answer, int64 [B, S]; padded on the right."""
    states, answers = [], []
    for prompt, answer in lessons:
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            seen = model.model(ids[:, :-1], output_hidden_states=True).hidden_states
        states.append(seen[-2][0])
        answers.append(ids[0, 1:].clone())
        answers[-1][: len(prompt) - 1] = IGNORED
    return pad_sequence(states, True), pad_sequence(answers, True, IGNORED)


def length_of(lesson: Lesson) -> int:
    return sum(map(len, lesson))


def batched(lessons: list[Lesson], size: int = 16) -> list[list[Lesson]]:
    return [lessons[start : start + size] for start in range(0, len(lessons), size)]


def widen_vocabulary(model: Any, words: list[int]) -> None:
    """Give the model the real vocabulary: the words that it knows at their ids, the others never said."""
    for name, others in (("embed_tokens", torch.randn), ("lm_head", torch.zeros)):
        owner = model if name == "lm_head" else model.model
        known = getattr(owner, name).weight.detach()
        wide = others(VOCABULARY, known.shape[1])
        wide[words] = known
        getattr(owner, name).weight = torch.nn.Parameter(wide)
    model.config.vocab_size = VOCABULARY
