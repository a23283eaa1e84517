"""A router before a real server: it passes requests on, and fails in the ways that are its own."""

import asyncio
import threading
from typing import Any, Self

import aiohttp
from aiohttp import web


class Router:
    """An HTTP server in a thread of its own that passes everything on to `target`; use as a context manager."""

    def __init__(self, target: str, *, hidden: tuple[str, ...] = (), keeps_ids: bool = True):
        self.target = target
        self.hidden = hidden  # paths that it does not know
        self.keeps_ids = keeps_ids  # if not, the wish for token ids is lost on the way
        self.down = False
        self.asked = 0
        self.in_hand: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Self:
        started = threading.Event()
        self.thread = threading.Thread(target=asyncio.run, args=(self.serve(started),), daemon=True)
        self.thread.start()
        assert started.wait(30)
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(30)

    async def serve(self, started: threading.Event) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as self.session:
            started.set()
            await self.stop.wait()
            await runner.cleanup()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        task = asyncio.ensure_future(self.pass_on(request))
        self.in_hand.add(task)
        try:
            if not self.down:
                return await task
        except asyncio.CancelledError:
            pass  # cut off
        finally:
            task.cancel()
            self.in_hand.discard(task)
        assert request.transport is not None
        request.transport.abort()
        return web.Response(status=503)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.hidden:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json() if request.can_read_body else None
        if request.path == "/v1/chat/completions":
            self.asked += 1
            if not self.keeps_ids:
                body.pop("return_token_ids")
        url = self.target + request.path
        async with self.session.request(request.method, url, json=body) as reply:
            return web.Response(
                body=await reply.read(), status=reply.status, content_type=reply.content_type
            )

    def cut(self) -> None:
        """Drop every connection, now and until `mend`, as a router does that dies."""
        self.down = True
        for task in list(self.in_hand):
            self.loop.call_soon_threadsafe(task.cancel)

    def mend(self) -> None:
        """Be there again."""
        self.down = False
