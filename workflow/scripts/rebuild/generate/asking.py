"""How a generation is put to the server: rendering, room in the context, the request, and the row that comes of it."""

import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from rebuild.errors import StepError
from rebuild.generate.answers import Judge, Rendered, failed, rendered_prompt
from rebuild.generate.client import Endpoint, RequestFailed, ask, elapsed_since
from rebuild.generate.conversation import Conversation
from rebuild.tokens.chat import (
    PRESERVE,
    UnrenderableError,
    render_prompt,
    template_arguments,
    to_chat_messages,
)

PROBE = "a thought of long ago"
MESSAGE_KEYS = ["content", "reasoning_content", "tool_calls", "tool_call_id", "name"]
MARGIN = 1  # tokens of the context that stay free
SAMPLING = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Asker:
    """Puts generations to a server: tokenizer, limits in tokens, and the sampling that every request carries."""

    tokenizer: Any
    judge: Judge
    context_length: int
    sampling: dict[str, Any]
    min_answer_tokens: int
    max_attempts: int
    keep_reasoning: bool
    logprobs: bool = False

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The chat template's arguments, for our own rendering and the server's."""
        given: dict[str, Any] = self.sampling["chat_template_kwargs"]
        return template_arguments(given, keep_reasoning=self.keep_reasoning)

    def check_history(self) -> None:
        """Stop if the chat template treats the thoughts of earlier answers otherwise than configured.

        Raises:
            StepError: `preserve` with a template that drops them, or `strip` with one that is told to keep them.
        """
        user = dict.fromkeys(MESSAGE_KEYS) | {"role": "user", "content": "?"}
        answer = user | {"role": "assistant", "reasoning_content": PROBE}
        history = to_chat_messages([user, answer, user])
        ids = render_prompt(self.tokenizer, history, None, self.template_kwargs)
        if self.keep_reasoning and PROBE not in self.tokenizer.decode(ids):
            raise StepError(
                "the chat template leaves out the thoughts of earlier answers",
                where="generate.history_reasoning: preserve",
                expected=f"a template that renders reasoning_content of past turns when {PRESERVE} is set",
                seen=repr(self.tokenizer.decode(ids)[-200:]),
                remedy="set generate.history_reasoning: strip, as the model was trained",
            )
        if not self.keep_reasoning and self.template_kwargs.get(PRESERVE):
            raise StepError(
                "two settings contradict each other",
                where="generate.history_reasoning and sampling.chat_template_kwargs",
                expected=f"generate.history_reasoning: preserve, or no {PRESERVE}",
                seen=f"generate.history_reasoning: strip, and {PRESERVE}: true",
                remedy=f"take {PRESERVE} out: generate.history_reasoning decides",
            )

    def render(self, conversation: Conversation) -> Rendered:
        """Return what identifies the next generation's prompt, rendered as the server will render it."""
        try:
            ids = self.render_ids(conversation)
        except UnrenderableError as error:
            return Rendered(0, b"", False, refusal=str(error))
        return rendered_prompt(ids, self.judge, offers_tools=conversation.tools is not None)

    def render_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids of the next generation's prompt."""
        tools = json.loads(conversation.tools) if conversation.tools else None
        messages = to_chat_messages(conversation.history)
        return render_prompt(self.tokenizer, messages, tools, self.template_kwargs)

    def room(self, rendered: Rendered) -> int:
        """Return how many tokens an answer may have in what the prompt leaves of the context."""
        return max(self.context_length - rendered.length - MARGIN, 0)

    async def generate(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        conversation: Conversation,
        rendered: Rendered,
    ) -> Row:
        """Return the fields that one generation decides; a prompt that cannot be asked is skipped with its reason.

        Raises:
            ServerLost: the server died meanwhile.
        """
        if rendered.refusal is not None:
            return {"status": "skipped", "error": f"unrenderable: {rendered.refusal}"}
        room = self.room(rendered)
        if room < self.min_answer_tokens:
            return too_long(rendered.length, room, self.context_length)
        max_tokens = min(self.sampling["max_tokens"], room)
        body = request_body(conversation, self.sampling, self.template_kwargs, max_tokens)
        if self.logprobs:
            body["logprobs"] = True
        began = time.monotonic()
        try:
            reply, attempt = await ask(session, endpoint, body, self.max_attempts)
        except RequestFailed as error:
            fields = failed(f"request: {error}")
            attempt = error.attempts
        else:
            fields = self.judge.outcome(reply, rendered, lambda: self.render_ids(conversation))
        return fields | {"attempt": attempt, "latency_s": elapsed_since(began)}


def too_long(length: int, room: int, context: int) -> Row:
    """Return the fields of a prompt that is skipped because it leaves no room for an answer."""
    reason = f"prompt_too_long: its {length} tokens leave {room} of {context}"
    return {"status": "skipped", "error": reason, "prompt_tokens": length}


def request_body(
    conversation: Conversation,
    sampling: dict[str, Any],
    template_kwargs: dict[str, Any],
    max_tokens: int,
) -> dict[str, Any]:
    """Return a chat completion request: messages, tools, ids wanted back, and every sampling parameter explicit."""
    body = {
        "messages": to_chat_messages(conversation.history),
        "max_tokens": max_tokens,
        "stream": False,
        "return_token_ids": True,
        "chat_template_kwargs": template_kwargs,
        "frequency_penalty": 0.0,
        **{name: sampling[name] for name in SAMPLING},
    }
    if conversation.tools:
        body["tools"] = json.loads(conversation.tools)
    return body
