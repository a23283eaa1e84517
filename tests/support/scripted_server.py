"""A server that misbehaves on demand: the faults that a real SGLang does not show when asked to.

It renders prompts and answers like SGLang's chat completions with `return_token_ids`; which fault a request meets is
decided by the test, per request. It is used for faults only; everything else is tested against the real server.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from rebuild.tokens.chat import render_prompt

Reply = dict[str, Any]
# Given the request and how often this very prompt was asked before, name a fault or None.
Script = Callable[[dict[str, Any], int], str | None]


class ScriptedServer:
    """An HTTP server in a thread of its own; use as a context manager."""

    def __init__(self, tokenizer: Any, script: Script, answer: str = "Blue.") -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.most_in_flight = 0
        self.in_flight = 0
        self.url = ""

    def __enter__(self) -> "ScriptedServer":
        started = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(started,), daemon=True)
        self.thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)

    def run(self, started: threading.Event) -> None:
        asyncio.run(self.serve(started))

    async def serve(self, started: threading.Event) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self.stop.wait()
        await runner.cleanup()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked_before = sum(old["messages"] == body["messages"] for old in self.requests)
        self.requests.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.misbehave(self.script(body, asked_before), body, request)
        finally:
            self.in_flight -= 1

    async def misbehave(
        self, fault: str | None, body: dict[str, Any], request: web.Request
    ) -> web.StreamResponse:
        if fault is not None and fault.isdecimal():
            return web.json_response({"message": f"scripted {fault}"}, status=int(fault))
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "disconnect":
            return await self.cut_off(body, request)
        if fault == "slow drip":
            return await self.drip(body, request)
        if fault == "html":
            return web.Response(text="<html>busy</html>")
        return web.json_response(FAULTS.get(fault or "", lambda reply: reply)(self.reply(body)))

    async def cut_off(self, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        """Promise a whole body, send half of it, and close the connection."""
        raw = web.json_response(self.reply(body)).body
        response = web.StreamResponse(headers={"Content-Length": str(len(raw))})
        await response.prepare(request)
        await response.write(bytes(raw[: len(raw) // 2]))
        request.transport.close()
        return response

    async def drip(self, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        """Send the whole answer, in small pieces, far apart."""
        raw = bytes(web.json_response(self.reply(body)).body)
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(raw), 200):
            await response.write(raw[start : start + 200])
            await asyncio.sleep(0.05)
        return response

    def reply(self, body: dict[str, Any]) -> Reply:
        """Return what SGLang returns for a plain answer."""
        prompt = render_prompt(
            self.tokenizer, body["messages"], body.get("tools"), body["chat_template_kwargs"]
        )
        ids = [*self.tokenizer.encode(self.answer), self.tokenizer.eos_token_id]
        choice = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": self.answer,
                "reasoning_content": None,
                "tool_calls": None,
            },
            "finish_reason": "stop",
            "matched_stop": ids[-1],
            "prompt_token_ids": prompt,
            "response_token_ids": ids,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"id": "scripted", "choices": [choice], "usage": usage}


def changed(**fields: Any) -> Callable[[Reply], Reply]:
    """Return a fault that sets fields of the first choice."""

    def change(reply: Reply) -> Reply:
        reply["choices"][0] |= fields
        return reply

    return change


without_ids = changed(response_token_ids=None, prompt_token_ids=None)


def with_other_text(reply: Reply) -> Reply:
    reply["choices"][0]["message"]["content"] = "Green, says nobody."
    return reply


def with_shifted_prompt(reply: Reply) -> Reply:
    reply["choices"][0]["prompt_token_ids"][3] += 1
    return reply


def without_stop(reply: Reply) -> Reply:
    reply["choices"][0]["response_token_ids"].pop()
    reply["usage"]["completion_tokens"] -= 1
    return reply


def miscounted(reply: Reply) -> Reply:
    reply["usage"]["completion_tokens"] += 5
    return reply


def without_ids_of_another_prompt(reply: Reply) -> Reply:
    reply["usage"]["prompt_tokens"] += 5
    return without_ids(reply)


def without_choices(reply: Reply) -> Reply:
    return reply | {"choices": []}


FAULTS: dict[str, Callable[[Reply], Reply]] = {
    "abort": changed(finish_reason="abort"),
    "no finish": changed(finish_reason=None),
    "no ids": without_ids,
    "no ids, abort": lambda reply: changed(finish_reason="abort")(without_ids(reply)),
    "no ids, other prompt": without_ids_of_another_prompt,
    "no response ids": changed(response_token_ids=[]),
    "other text": with_other_text,
    "other prompt": with_shifted_prompt,
    "no stop id": without_stop,
    "miscounted": miscounted,
    "no choices": without_choices,
}
