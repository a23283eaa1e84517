"""One question to an OpenAI-compatible server: what is sent, what may be tried again, and how long an answer may take."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
LONGEST_PAUSE_S = 30.0
CONNECT_S = 10.0
# A request is given up when it takes longer than queueing plus decoding at a rate that no healthy server falls below.
QUEUE_S = 600.0
SLOWEST_TOKENS_PER_S = 0.5

Answer = dict[str, Any]


class RequestFailed(Exception):
    """The server refused the request for good, or kept failing: the row becomes an error with this reason."""

    attempts = 1


class ServerLost(Exception):
    """The server is gone or hangs: no row is to blame, the request is put to its successor."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask: base URL, served model name, and whether the server behind it still lives."""

    url: str
    model_name: str
    alive: Callable[[], bool]


def open_session() -> aiohttp.ClientSession:
    """Return a session without a limit on connections or total time; `ask` sets each request's own deadline."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
    )


def request_deadline(max_tokens: int) -> float:
    """Return the seconds after which a request counts as hung."""
    return QUEUE_S + max_tokens / SLOWEST_TOKENS_PER_S


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, body: dict[str, Any], max_attempts: int
) -> tuple[Answer, int]:
    """Return the parsed reply to one chat completion, and the attempt that got it (1 is the first).

    Raises:
        RequestFailed: a permanent refusal, or `max_attempts` passing failures in a row.
        ServerLost: the server behind the endpoint has died.
    """
    payload = orjson.dumps(body | {"model": endpoint.model_name})
    reason = ""
    for attempt in range(1, max_attempts + 1):
        try:
            async with asyncio.timeout(request_deadline(body["max_tokens"])):
                return await post(session, f"{endpoint.url}/v1/chat/completions", payload), attempt
        except PassingFailure as error:
            reason = str(error)
        except RequestFailed as error:
            error.attempts = attempt
            raise
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
        except TimeoutError:
            reason = f"no answer in {request_deadline(body['max_tokens']):.0f} s"
        if not await asyncio.to_thread(endpoint.alive):
            raise ServerLost(reason)
        if attempt < max_attempts:
            await asyncio.sleep(pause(attempt))
    failure = RequestFailed(f"{reason} ({max_attempts} attempts)")
    failure.attempts = max_attempts
    raise failure


class PassingFailure(Exception):
    """A failure that may be over at the next try."""


async def post(session: aiohttp.ClientSession, url: str, payload: bytes) -> Answer:
    """Send one request and return the parsed body.

    Raises:
        PassingFailure: a status that may pass, or a body that is not JSON (cut short on the way).
        RequestFailed: any other status than 200.
    """
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=payload, headers=headers) as response:
        raw = await response.read()
        if response.status in TRANSIENT:
            raise PassingFailure(f"HTTP {response.status}: {excerpt(raw)}")
        if response.status != 200:
            raise RequestFailed(f"HTTP {response.status}: {excerpt(raw)}")
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise PassingFailure(f"the reply is not JSON: {error}: {excerpt(raw)}") from error
    if not isinstance(answer, dict):
        raise PassingFailure(f"the reply is not a JSON object: {excerpt(raw)}")
    return answer


def excerpt(raw: bytes) -> str:
    """Return the beginning of a body as one line."""
    return " ".join(raw[:300].decode("utf-8", "replace").split())


def pause(attempt: int) -> float:
    """Return the seconds before the next try: exponential, with full jitter, at most LONGEST_PAUSE_S."""
    return random.uniform(0, min(LONGEST_PAUSE_S, 2.0**attempt))


def elapsed_since(began: float) -> float:
    """Return the seconds since `began` (time.monotonic), to the millisecond."""
    return round(time.monotonic() - began, 3)
