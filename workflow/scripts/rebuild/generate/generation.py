"""Answers all prompts of one shard: preparation while the server loads, a bounded number of workers, a row per generation.

Memory holds the shard's prompts as one Arrow table and a few numbers per prompt; answers go to the partial log at once.
"""

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pyarrow.parquet as pq

from rebuild.generate.answers import Rendered
from rebuild.generate.asking import Asker
from rebuild.generate.breaker import Breaker
from rebuild.generate.client import Endpoint, open_session
from rebuild.generate.conversation import Conversation, replay
from rebuild.generate.partial_log import PartialLog
from rebuild.progress import Progress, duration

PREPARED_AT_ONCE = 64
NAMED_AT_MOST = 4

Row = dict[str, Any]


class Task(NamedTuple):
    """A conversation that waits for a worker; sorts so that most turns and the longest prompt come first."""

    minus_turns: int
    minus_length: int
    row: int
    rendered: Rendered | None


LAST = Task(1, 0, -1, None)


class ShardGeneration:
    """The state of one shard on its way from prompts to rows."""

    def __init__(self, prompts: Path, log: PartialLog, asker: Asker) -> None:
        self.table = pq.read_table(prompts)
        self.log = log
        self.asker = asker
        self.breaker = Breaker()
        self.queue: asyncio.PriorityQueue[Task] = asyncio.PriorityQueue()
        self.in_flight: dict[str, float] = {}
        self.unfinished = len(self.table)
        self.stopping = threading.Event()
        self.statuses: Counter[str] = Counter()
        self.tokens = 0
        self.tokens_before = 0
        self.first_request: float | None = None
        self.progress = Progress(len(self.table), "prompts")

    def prepare(self, loop: asyncio.AbstractEventLoop) -> None:
        """Render and measure the first prompt of every conversation, long ones first, and queue it (in a thread)."""
        batch: list[Task | None] = []
        for row in self.by_size():
            if self.stopping.is_set():
                return
            batch.append(self.prepare_one(row))
            if len(batch) == PREPARED_AT_ONCE:
                loop.call_soon_threadsafe(self.enqueue, batch)
                batch = []
        loop.call_soon_threadsafe(self.enqueue, batch)

    def by_size(self) -> list[int]:
        """Return the row numbers, those with most turns and then most characters first."""
        sizes = [
            (
                sum(m["role"] == "user" for m in messages),
                sum(len(m["content"] or "") for m in messages),
            )
            for batch in self.table.select(["messages"]).to_batches(max_chunksize=256)
            for messages in batch.column(0).to_pylist()
        ]
        return sorted(range(len(sizes)), key=lambda row: sizes[row], reverse=True)

    def prepare_one(self, row: int) -> Task | None:
        """Return the task of one prompt, or None if an earlier attempt finished it."""
        conversation = self.conversation(row)
        if conversation.finished:
            return None
        rendered = self.asker.render(conversation)
        return Task(-len(conversation.waiting), -rendered.length, row, rendered)

    def conversation(self, row: int) -> Conversation:
        """Return a prompt's conversation after what the log holds of it."""
        prompt: Row = self.table.slice(row, 1).to_pylist()[0]
        return replay(prompt, self.log.rows_of(prompt["prompt_id"]), self.asker.keep_reasoning)[0]

    def enqueue(self, batch: list[Task | None]) -> None:
        """Queue prepared tasks, and count what was finished already (in the event loop)."""
        for task in batch:
            if task is None:
                self.finish_one()
            else:
                self.queue.put_nowait(task)

    def finish_one(self) -> None:
        """Count a finished conversation; after the last one, tell the workers."""
        self.unfinished -= 1
        self.progress.done += 1  # the watchdog says it
        if not self.unfinished:
            self.queue.put_nowait(LAST)

    def begin_round(self) -> None:
        """Count time and tokens per second anew, for a fresh server."""
        self.first_request = None
        self.tokens_before = self.tokens

    async def ask_all(self, endpoints: list[Endpoint], concurrency: int) -> None:
        """Answer all that is queued or still being prepared, `concurrency` conversations at a time in all.

        Raises:
            ExceptionGroup: of ServerLost (what is unfinished is queued again) or StepError (the breaker tripped).
        """
        async with open_session() as session, asyncio.TaskGroup() as group:
            for number in range(max(1, min(concurrency, self.unfinished))):
                group.create_task(self.work(session, endpoints[number % len(endpoints)]))

    async def work(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        """Take conversations from the queue until the last one is finished."""
        while (task := await self.queue.get()) is not LAST:
            try:
                await self.converse(session, endpoint, task)
            except BaseException:
                self.queue.put_nowait(task._replace(rendered=None))
                raise
            self.finish_one()
        self.queue.put_nowait(LAST)

    async def converse(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, task: Task
    ) -> None:
        """Ask one conversation to its end, turn by turn, every outcome logged as it comes."""
        conversation = self.conversation(task.row)
        rendered = task.rendered
        self.first_request = self.first_request or time.monotonic()
        while not conversation.finished:
            row = conversation.skeleton()
            rendered = rendered or self.asker.render(conversation)
            self.in_flight[row["sample_id"]] = time.monotonic()
            try:
                row |= await self.asker.generate(session, endpoint, conversation, rendered)
            finally:
                del self.in_flight[row["sample_id"]]
            self.record(row)
            conversation.accept(row)
            rendered = None

    def record(self, row: Row) -> None:
        """Log a row, count it, and stop the job if failures pile up."""
        self.log.append(row)
        self.statuses[row["status"]] += 1
        self.tokens += len(row["response_token_ids"])
        self.breaker.record(row["error"] if row["status"] == "error" else None)

    def note(self) -> str:
        """Return the progress line's second half: rows by status, tokens per second, and what is waited for."""
        parts = [", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))]
        if self.first_request and self.tokens > self.tokens_before:
            seconds = max(time.monotonic() - self.first_request, 1e-9)
            parts.append(f"{(self.tokens - self.tokens_before) / seconds:.0f} tokens/s")
        if self.queue.empty() and 0 < len(self.in_flight) <= NAMED_AT_MOST:
            waits = [f"{k} ({duration(time.monotonic() - t)})" for k, t in self.in_flight.items()]
            parts.append("waiting for " + ", ".join(waits))
        return "; ".join(part for part in parts if part)
