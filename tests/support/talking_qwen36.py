"""A tiny Qwen3.6 that has learnt some conversations by heart: thoughts end, tools are called, answers stop by themselves.

Its layers, tokenizer and template are those of `qwen36`. What it says is in `talks`, and under the production sampling
it says just that: each token is so certain that no other is within top_p.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import tests.support.talks
from rebuild.files import read_json, write_json
from tests.support.models import cached_model, qwen36_tokenizer, source_hash
from tests.support.qwen36 import ATTENTION_EVERY, VOCABULARY
from tests.support.talks import TALKS

Lesson = tuple[list[int], list[int]]  # ids of a prompt and its answer

LAYERS = 64
SURE = (
    0.99  # least probability of every token that is learnt; the production sampling's top_p is 0.95
)
LONGEST = 160  # tokens of an answer that are learnt: what never ends is cut here
IGNORED = -100


def talking_qwen36() -> Path:
    """Return the model's folder (half a minute the first time)."""
    tokenizer = qwen36_tokenizer()
    talks = source_hash(Path(tests.support.talks.__file__))
    return cached_model(
        f"talking-{talks}-{tokenizer.name}",
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
    while min(study(model, *batch) for batch in batches) < SURE:
        torch.nn.utils.clip_grad_norm_(learning, 50.0)
        optimizer.step()
        optimizer.zero_grad()


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
