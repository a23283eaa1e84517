"""Keeps a server under a shard until all is answered: start, readiness, watchdog, and a bounded number of restarts."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import requests

from rebuild.client import ServerLost, open_session
from rebuild.errors import StepError
from rebuild.external import ExternalServers
from rebuild.generation import ShardGeneration
from rebuild.golden import check_golden
from rebuild.server import Server, ServerDied
from rebuild.step import say

AnyServer = Server | ExternalServers

WATCH_S = 2.0
# A few more in flight than the server runs at once keep its queue from running dry.
QUEUED_SHARE = 1.1


@dataclass(frozen=True)
class ServingOptions:
    """How long to wait, how often to try again, and how much to ask at once (settings `server` and `generate`)."""

    ready_s: float
    stall_s: float
    max_restarts: int
    min_running_requests: int
    concurrency: int | str
    golden: list[dict[str, Any]]


@dataclass
class Timing:
    """Where a job's time went, in seconds, summed over server starts."""

    startup_s: float = 0.0
    first_request_s: float = 0.0
    answering_s: float = 0.0
    server_starts: int = 0


async def answer_shard(
    shard: ShardGeneration, start: Callable[[], AnyServer], options: ServingOptions
) -> Timing:
    """Answer all prompts of the shard on servers made by `start`, one after another as they fail.

    Prompts are rendered while a server loads. No server is started when an earlier attempt left nothing to ask.

    Raises:
        StepError: more than `max_restarts` servers failed, or requests keep failing.
    """
    timing = Timing()
    loop = asyncio.get_running_loop()
    preparing = asyncio.create_task(asyncio.to_thread(shard.prepare, loop))
    try:
        if shard.log.rows:
            await preparing
            await asyncio.sleep(0)  # lets the last prepared batch be queued
        while shard.unfinished:
            reason = await answer_on_one_server(shard, preparing, start, options, timing)
            if reason is not None and timing.server_starts > options.max_restarts:
                raise given_up(reason, timing.server_starts)
    finally:
        shard.stopping.set()
    return timing


async def answer_on_one_server(
    shard: ShardGeneration,
    preparing: "asyncio.Task[None]",
    start: Callable[[], AnyServer],
    options: ServingOptions,
    timing: Timing,
) -> StepError | None:
    """Start a server and answer all that is left; return why the server was lost, or None when all is answered."""
    began = time.monotonic()
    timing.server_starts += 1
    with start() as server:
        try:
            await asyncio.to_thread(server.wait_ready, options.ready_s)
            ready = time.monotonic()
            timing.startup_s += ready - began
            concurrency = await asyncio.to_thread(choose_concurrency, server, options)
            shard.first_request = None
            await check_first(shard, server, options.golden)
            await run_round(shard, preparing, server, concurrency, options.stall_s)
        except ServerDied as error:
            return error
        except ServerLost as lost:
            say(f"server lost: {lost}; {shard.unfinished} prompts are unfinished")
            return server.died(str(lost))
        finally:
            if shard.first_request:
                timing.first_request_s = round(shard.first_request - ready, 3)
                timing.answering_s += time.monotonic() - shard.first_request
    return None


async def run_round(
    shard: ShardGeneration,
    preparing: "asyncio.Task[None]",
    server: AnyServer,
    concurrency: int,
    stall_s: float,
) -> None:
    """Ask until all is answered, under the watchdog; an exception is the first cause, not a group."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for(preparing))
            watchdog = group.create_task(watch(shard, server, stall_s))
            await shard.ask_all(server.endpoints(), concurrency)
            watchdog.cancel()
    except BaseExceptionGroup as failures:
        raise first_cause(failures) from failures


async def check_first(
    shard: ShardGeneration, server: AnyServer, golden: list[dict[str, Any]]
) -> None:
    """Have the golden prompts answered before any other; ServerLost if an answer is wrong."""
    async with open_session() as session:
        for endpoint in server.endpoints():
            kwargs = shard.asker.template_kwargs
            await check_golden(session, endpoint, golden, kwargs)


async def wait_for(preparing: "asyncio.Task[None]") -> None:
    """Pass on an error of the preparation; the preparation itself outlives a lost server."""
    await asyncio.shield(preparing)


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception that a group is about: what a person must act on before what a restart mends."""
    for kind in (StepError, ServerLost):
        matching = failures.subgroup(kind)
        while isinstance(matching, BaseExceptionGroup):
            if not isinstance(matching.exceptions[0], BaseExceptionGroup):
                return matching.exceptions[0]
            matching = matching.exceptions[0]
    return failures


def choose_concurrency(server: AnyServer, options: ServingOptions) -> int:
    """Return the conversations to keep in flight: as configured, or a little more than the server runs at once.

    Raises:
        StepError: the server runs fewer requests at once than the configured floor.
    """
    running = server.effective_running_requests()
    if running < options.min_running_requests:
        raise StepError(
            f"the server runs only {running} requests at once",
            where=f"server log {server.log}",
            expected=f"server.min_running_requests = {options.min_running_requests} or more",
            seen=f"effective max_running_requests {running} (limited by KV cache, or by state slots on hybrid models)",
            remedy="raise mem-fraction-static; on hybrid models set disable-radix-cache: true (1 state slot a request "
            "instead of 3 to 5); or lower server.min_running_requests",
        )
    if options.concurrency != "auto":
        return int(options.concurrency)
    concurrency = math.ceil(QUEUED_SHARE * running)
    say(f"the server runs {running} requests at once: {concurrency} conversations in flight")
    return concurrency


async def watch(shard: ShardGeneration, server: AnyServer, stall_s: float) -> None:
    """Watch the server's tokens, not its health: a server that answers probes but decodes nothing is lost.

    Raises:
        ServerLost: it died, or no token came for `stall_s` seconds while requests were in flight.
    """
    tokens, moved = -1, time.monotonic()
    while True:
        await asyncio.sleep(WATCH_S)
        await asyncio.to_thread(shard.log.sync_if_due)
        if not server.alive():
            raise ServerLost("its process ended")
        seen = await asyncio.to_thread(read_tokens, server)
        now = time.monotonic()
        if not shard.in_flight or seen not in (tokens, None):
            tokens, moved = seen if seen is not None else tokens, now
        if server.counts_tokens and now - moved > stall_s:
            raise ServerLost(
                f"no token in {now - moved:.0f} s with {len(shard.in_flight)} requests in flight"
            )
        shard.progress.update(0, shard.note())


def read_tokens(server: AnyServer) -> int | None:
    """Return the server's token count, or None while it does not answer."""
    try:
        return server.tokens_generated()
    except requests.RequestException:
        return None


def given_up(reason: StepError, starts: int) -> StepError:
    """Return the error after the last permitted restart."""
    return StepError(
        f"{starts} servers failed one after another; the last: {reason.what}",
        where=reason.where,
        expected=reason.expected,
        seen=reason.seen,
        remedy=f"{reason.remedy}; finished answers are kept, a new start goes on after them",
    )
