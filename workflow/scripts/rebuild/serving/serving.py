"""Keeps a server under a shard until all is answered: start, readiness, watchdog, and a bounded number of restarts."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import requests

from rebuild.errors import StepError
from rebuild.generate.client import ServerLost, open_session
from rebuild.generate.generation import ShardGeneration
from rebuild.serving.external import ExternalServers
from rebuild.serving.failure import explain_status
from rebuild.serving.golden import check_golden
from rebuild.serving.server import Server, ServerDied
from rebuild.step import say

AnyServer = Server | ExternalServers

WATCH_S = 2.0
WAKE_S = 1.0
USAGE_ERROR = 2  # the exit status of a program that refuses its command line
# One more in flight for every ten that the server runs at once keeps its queue from running dry.
QUEUED_PER = 10


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


@dataclass(frozen=True)
class Loss:
    """A server that was lost: the error that the job ends with if it gets no other, and how far the server had come."""

    reason: StepError
    ready: bool
    hopeless: bool = False  # no other server can do better


async def answer_shard(
    shard: ShardGeneration, start: Callable[[], AnyServer], options: ServingOptions
) -> Timing:
    """Answer all prompts of the shard on servers made by `start`, one after another as they fail.

    Prompts are rendered while a server loads. No server is started when an earlier attempt left nothing to ask.

    Raises:
        StepError: more than `max_restarts` servers failed or none can start, or requests keep failing.
    """
    timing = Timing()
    losses: list[Loss] = []
    loop = asyncio.get_running_loop()
    preparing = asyncio.create_task(asyncio.to_thread(shard.prepare, loop))
    waking = asyncio.create_task(wake_often())
    try:
        if shard.log.rows:
            await preparing
            await asyncio.sleep(0)  # lets the last prepared batch be queued
        while shard.unfinished:
            loss = await answer_on_one_server(shard, preparing, start, options, timing)
            losses += [loss] if loss else []
            if loss and (len(losses) > options.max_restarts or is_hopeless(losses)):
                raise given_up(losses)
    finally:
        shard.stopping.set()
        waking.cancel()
    return timing


async def wake_often() -> None:
    """Keep the event loop from waiting long for anything, as for a server that loads.

    Python handles signals between two steps of the main thread: one that comes as the loop begins to wait, or to
    another thread, would be left until the wait is over.
    """
    while True:
        await asyncio.sleep(WAKE_S)


async def answer_on_one_server(
    shard: ShardGeneration,
    preparing: "asyncio.Task[None]",
    start: Callable[[], AnyServer],
    options: ServingOptions,
    timing: Timing,
) -> Loss | None:
    """Start a server and answer all that is left; return how the server was lost, or None when all is answered."""
    began = time.monotonic()
    timing.server_starts += 1
    shard.begin_round()
    with start() as server:
        try:
            await asyncio.to_thread(server.wait_ready, options.ready_s)
        except ServerDied as error:
            return Loss(error, ready=False, hopeless=cannot_start(server))
        ready = time.monotonic()
        timing.startup_s += ready - began
        try:
            concurrency = await asyncio.to_thread(choose_concurrency, server, options)
            await check_first(shard, server, options)
            await run_round(shard, preparing, server, concurrency, options.stall_s)
        except ServerLost as lost:
            reason = explain_loss(server, lost)
            say(f"server lost: {reason}; {shard.unfinished} prompts are unfinished")
            return Loss(server.died(reason), ready=True)
        finally:
            if shard.first_request:
                timing.first_request_s = round(shard.first_request - ready, 3)
                timing.answering_s += time.monotonic() - shard.first_request
    return None


def cannot_start(server: AnyServer) -> bool:
    """Tell whether another start is in vain: SGLang refuses its command line, or the server is not ours to start."""
    return isinstance(server, ExternalServers) or server.exit_status() == USAGE_ERROR


def is_hopeless(losses: list[Loss]) -> bool:
    """Tell whether the next server would end as the last one did.

    A first start may fail for a reason that passes: a port that was taken, memory that another process is still giving
    back. When no server was ever ready and the second one fails like the first, the settings or the model are at fault.
    """
    if losses[-1].hopeless:
        return True
    never_ready = not any(loss.ready for loss in losses)
    return never_ready and len({loss.reason.what for loss in losses}) < len(losses)


def explain_loss(server: AnyServer, lost: ServerLost) -> str:
    """Return why a server was lost: its own end before whatever a request saw of it."""
    status = None if isinstance(server, ExternalServers) else server.exit_status()
    return str(lost) if status is None else f"it ended at work, {explain_status(status)}"


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


async def check_first(shard: ShardGeneration, server: AnyServer, options: ServingOptions) -> None:
    """Have the golden prompts answered before any other; ServerLost if an answer is wrong or does not come."""
    patience = (
        options.stall_s if server.counts_tokens else None
    )  # others may be ahead of us in the queue
    kwargs = shard.asker.template_kwargs
    async with open_session() as session:
        for endpoint in server.endpoints():
            await check_golden(session, endpoint, options.golden, kwargs, patience)


async def wait_for(preparing: "asyncio.Task[None]") -> None:
    """Pass on an error of the preparation; the preparation itself outlives a lost server."""
    await asyncio.shield(preparing)


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception that a group is about: what a person must act on before what a restart mends."""
    for kind in (StepError, ServerLost, Exception):
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
        ServerLost: it does not answer.
    """
    if options.concurrency != "auto" and options.min_running_requests == 1:
        return int(options.concurrency)  # nothing hangs on what the server says
    try:
        running = server.effective_running_requests()
    except requests.RequestException as error:
        raise ServerLost(f"it does not say how many requests it runs at once: {error}") from error
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
    concurrency = running + math.ceil(running / QUEUED_PER)
    say(f"the server runs {running} requests at once: {concurrency} conversations in flight")
    return concurrency


async def watch(shard: ShardGeneration, server: AnyServer, stall_s: float) -> None:
    """Watch the server's tokens, not its health: a server that answers probes but decodes nothing is lost.

    Raises:
        ServerLost: it died, or no token came for `stall_s` seconds while requests were in flight.
    """
    counted, seen, moved = 0, (0, 0), time.monotonic()
    while True:
        await asyncio.sleep(WATCH_S)
        await asyncio.to_thread(shard.log.sync_if_due)
        if not await asyncio.to_thread(server.alive):
            raise ServerLost("it does not answer any more")
        counted = await count_tokens(server, counted, stall_s)
        now = time.monotonic()
        if not shard.in_flight or seen != (counted, shard.tokens):
            seen, moved = (counted, shard.tokens), now
        if server.counts_tokens and now - moved > stall_s:
            raise ServerLost(
                f"no token in {now - moved:.0f} s with {len(shard.in_flight)} requests in flight"
            )
        shard.progress.update(0, shard.note())


async def count_tokens(server: AnyServer, before: int, timeout_s: float) -> int:
    """Return the server's token count, or the one from before if it does not tell in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(server.tokens_generated)
    except (requests.RequestException, TimeoutError):
        return before


def given_up(losses: list[Loss]) -> StepError:
    """Return the error after the last permitted restart, or after a loss that no restart can mend."""
    last = losses[-1].reason
    several = f"{len(losses)} servers failed one after another; the last: "
    return StepError(
        f"{several if len(losses) > 1 else ''}{last.what}",
        where=last.where,
        expected=last.expected,
        seen=last.seen,
        remedy=f"{last.remedy}; finished answers are kept, a new start goes on after them",
    )
