"""Processes one partition of prompts, from its assignment to this bridge until it is revoked.

A processor fences the former one (`streams/log/transactions.py`), reads the commit, and continues
from there. Answers, dead letters, position and note are committed together. If a processor fails,
all processors of the process end, and new ones start from the log.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, LeaseError, RecordTooLarge, TriviumError
from schemas.settings import LogSettings
from streams.bridge.answers import ERROR_STEPS
from streams.bridge.log_reader import PromptLogReader, replay
from streams.bridge.pending_prompt import PairIO, PendingPrompt
from streams.bridge.progress import WINDOW, WINDOW_BYTES, CommitNote, OffsetTracker, decode, encode
from streams.bridge.prompt_reader import PromptReader
from streams.bridge.records.record import PromptRecord
from streams.bridge.submitter import Submitter
from streams.bridge.turns.slots import ModelSlots
from streams.calls.stream.hub import Hub
from streams.log.cancellation import cancel_and_wait
from streams.log.transactions import CommittedOffset, FullPlace, Transactions, committed_offsets

log = logging.getLogger(__name__)
COMMIT_EVERY_S = 0.03  # answers of this interval are committed together
COMMIT_SHARE = 0.25  # share of the time for commits; under load they are larger and less frequent
COMMIT_MAX = 500  # prompts in one commit


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """The objects that all partition processors of a bridge process share."""

    log: LogSettings
    codec: Codec
    bridge_id: str
    group_id: str
    submitter: Submitter
    slots: ModelSlots
    may_ask: asyncio.Event  # clear during a rebalance, when other bridges may own the partitions
    fail: Callable[[BaseException], None]
    epoch: int  # of the membership in the fleet


class PartitionProcessor:
    """Processes one partition: call `begin`, then `take` with records in order, then `stop`."""

    def __init__(self, shared: ProcessorContext, place: FullPlace, pair_io: PairIO) -> None:
        self._shared, self._place, self._pair_io = shared, place, pair_io
        topic, partition = place
        self._transactions = Transactions(shared.log, f"bridge-{topic}-{partition}")
        self._log_reader = PromptLogReader(shared.log, place, f"{shared.bridge_id}-past")
        self._progress = OffsetTracker(0)
        self._inherited: dict[int, int] = {}  # offsets in `tokens` for predecessors' requests
        self._covered: set[int] = set()  # partitions of `tokens` that the last commit names
        self._under_way: dict[int, PendingPrompt] = {}
        self._outbox: list[PendingPrompt] = []  # prompts with records to commit
        self._lines: dict[bytes, deque[PendingPrompt]] = {}  # prompts that wait their turn, by key
        self._changed = asyncio.Condition()  # notified after each commit
        self._wake = asyncio.Event()
        self._committing = asyncio.Lock()
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()
        self._over = False
        self._prompt_reader = PromptReader(shared.submitter, self._commit)
        self._taking = 0  # number of records that wait for room
        self._moved_s, self._offset = 0.0, -1  # time and offset of the last progress

    # Start and stop

    def begin(self, former: "asyncio.Task[None] | None" = None) -> None:
        """Take over the partition, then accept records; first wait for the `former` processor.

        Both have the same transactional id and the same request ids.
        """
        self._spawn(self._run(former))

    @property
    def is_ready(self) -> bool:
        """Return whether the partition has been taken over."""
        return self._ready.is_set()

    async def stop(self) -> None:
        """Stop without a commit; the next owner continues the open prompts."""
        self._over = True
        async with AsyncExitStack() as closing:  # runs all callbacks, also when cancelled meanwhile
            closing.push_async_callback(self._transactions.stop)
            closing.push_async_callback(self._log_reader.close)
            closing.callback(self._release)
            closing.push_async_callback(self._prompt_reader.forgive, self._write)
            await cancel_and_wait(*self._tasks)

    def _release(self) -> None:
        for prompt in self._under_way.values():
            self._shared.submitter.release(prompt)

    async def flush(self) -> None:
        """Commit the answers that are ready."""
        if self._outbox and self._ready.is_set():
            await self._commit()

    def _spawn(self, work: Coroutine[Any, Any, object]) -> "asyncio.Task[object]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over:
            self._shared.fail(error)

    async def _run(self, former: "asyncio.Task[None] | None") -> None:
        if former is not None:
            await asyncio.wait([former])
        recovered = await self._take_over()
        self._spawn(self._commit_forever())
        for prompt in recovered:
            self._admit(prompt)
        self._ready.set()

    async def _take_over(self) -> list[PendingPrompt]:
        """Take over the partition; return the prompts that its last owner left open, in order."""
        shared = self._shared
        await self._transactions.start()
        commit = (await committed_offsets(shared.log, shared.group_id, [self._place])).get(
            self._place
        )
        first, end = await self._log_reader.bounds()
        position, note = first, CommitNote()
        if commit is not None:
            position, note = max(first, commit.offset), decode(commit.metadata, commit.offset)
        self._progress = OffsetTracker(position, note.answered)
        self._prompt_reader.begin(note, idle=position >= end)
        self._inherited = dict(note.tokens)
        await self._commit()  # the offset of its own tokens is committed before any request
        if not note.tokens:
            return []
        self._progress.window_bytes = note.window_bytes
        recovered = await self._read_again(position, min(end, position + WINDOW))
        self._progress.window_bytes = WINDOW_BYTES
        log.info("%s[%d]: goes on at %d, %d prompts", *self._place, position, len(recovered))
        readable = [prompt for prompt in recovered if prompt.question is not None]
        await self._replay([prompt for prompt in readable if not prompt.wants_vectors])
        return recovered

    async def _read_again(self, since: int, until: int) -> list[PendingPrompt]:
        """Read the prompts that the last owner may have read but not answered."""
        recovered: list[PendingPrompt] = []
        async with aclosing(self._log_reader.records(since, until)) as records:
            async for record in records:
                if not self._progress.has_room(record.offset, record.size):
                    break  # the last owner had no room for more either
                if (prompt := await self._read(record)) is not None:
                    recovered.append(prompt)
        return recovered

    async def _replay(self, recovered: list[PendingPrompt]) -> None:
        """Read the existing tokens, once for each try of the prompts; then follow new ones.

        Each pass has a hub of its own: the meaning of a partition's rows depends on their order,
        and the process, or its other processors, may have read further on the same partition.
        """
        submitter, inherited = self._shared.submitter, dict(self._inherited)
        batch, reached = recovered, dict[int, int]()
        while batch:
            hub = Hub()
            for prompt in batch:
                prompt.starts |= inherited
                hub.add(submitter.begin(prompt, inherited))
            for partition, offset in inherited.items():
                end = await self._read_tokens(hub, partition, offset)
                reached.setdefault(partition, end)
            failed = [
                prompt
                for prompt in batch
                if isinstance(error := await submitter.outcome(prompt), TriviumError)
                and submitter.should_retry(prompt, error)
            ]
            for prompt in failed:
                submitter.release(prompt)
            batch = failed
        reached = inherited | reached
        # Tokens of prompts without output can only follow this end. So the next owner reads from
        # here, and not everything again after each takeover.
        for prompt in recovered:
            if not submitter.has_output(prompt):
                prompt.starts |= reached
        self._inherited = dict(reached)
        self._spawn(self._follow(recovered, reached))

    async def _read_tokens(
        self, hub: Hub, partition: int, offset: int, *, live: bool = False
    ) -> int:
        shared = self._shared
        client_id = f"{shared.bridge_id}-replay"
        return await replay(shared.log, shared.codec, hub, partition, offset, client_id, live=live)

    async def _follow(self, recovered: list[PendingPrompt], reached: dict[int, int]) -> None:
        """Follow the partitions of predecessors' requests until these prompts are answered."""
        hub = Hub()
        for prompt in recovered:
            if prompt.call is not None:
                hub.add(prompt.call)
        hub.go_live(self._shared.submitter.calls.hub.on_void)
        tasks = [self._spawn(self._read_tokens(hub, *at, live=True)) for at in reached.items()]
        async with self._changed:
            await self._changed.wait_for(
                lambda: not any(a.record.offset in self._under_way for a in recovered)
            )
        self._inherited = {}
        for task in tasks:
            task.cancel()

    # Records

    async def take(self, record: PromptRecord) -> None:
        """Take the next record, or an older one; return when there is room for another, or when
        this processor has ended.
        """
        if self._over:
            return
        self._taking += 1
        await asyncio.wait([self._spawn(self._take(record))])
        self._taking -= 1

    async def _take(self, record: PromptRecord) -> None:
        await self._ready.wait()
        progress = self._progress
        if record.offset > progress.next_offset:  # a gap in the log, or records that Faust left out
            async with aclosing(self._log_reader.gap(progress.next_offset, record.offset)) as gap:
                async for missed in gap:
                    await self._take_next(missed)
        await self._take_next(record)

    async def _take_next(self, record: PromptRecord) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._progress.has_room(record.offset, record.size)
            )
        if (prompt := await self._read(record)) is not None:
            self._admit(prompt)

    async def _read(self, record: PromptRecord) -> PendingPrompt | None:
        """Parse a record's prompt; return None if it is already answered."""
        if not self._progress.take(record.offset, record.size):
            return None
        prompt = self._under_way[record.offset] = PendingPrompt(record, self._pair_io)
        await self._prompt_reader.read(prompt)
        return prompt

    def _admit(self, prompt: PendingPrompt) -> None:
        """Submit a prompt when a slot is free; with `ordered`, after earlier ones of its key."""
        key = prompt.record.key if self._pair_io.pair.ordered else None
        if key is not None:
            if key in self._lines:
                self._lines[key].append(prompt)
                return
            self._lines[key] = deque()
        self._spawn(self._ask(prompt))

    async def _ask(self, prompt: PendingPrompt) -> None:
        if prompt.sends is not None:
            self._finish(prompt)
            return
        shared = self._shared
        submitter = shared.submitter
        slots = submitter.vector_slots
        if not prompt.wants_vectors:
            slots = shared.slots.of(submitter.model_of(prompt).model)
        owner = shared.submitter.lines.owner(prompt.record)
        await slots.acquire(owner)
        try:
            prompt.sends = await shared.submitter.settle(prompt, self._may_send)
        finally:
            slots.release(owner)
        self._finish(prompt)

    def _finish(self, prompt: PendingPrompt) -> None:
        self._shared.submitter.release(prompt)
        self._outbox.append(prompt)
        self._wake.set()

    async def _may_send(self, partition: int) -> None:
        shared = self._shared
        await shared.may_ask.wait()
        if shared.submitter.process.member.epoch != shared.epoch:
            raise LeaseError(f"{shared.bridge_id}: was away; what it asked others may have")
        if partition not in self._covered:
            await self._commit()
        if partition not in self._covered:
            raise BrokerUnavailable(f"tokens[{partition}] is not read at the moment")

    # Commits

    async def _commit_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                began_s = time.monotonic()
                await self._commit()
                took_s = time.monotonic() - began_s
                await asyncio.sleep(max(COMMIT_EVERY_S, took_s * (1 / COMMIT_SHARE - 1)))

    async def _commit(self) -> None:
        async with self._committing:
            batch, self._outbox = self._outbox[:COMMIT_MAX], self._outbox[COMMIT_MAX:]
            try:
                await self._write_all(batch)
            except TriviumError as error:
                self._shared.fail(error)
                raise

    async def _write_all(self, batch: list[PendingPrompt]) -> None:
        try:
            await self._write(batch)
        except RecordTooLarge:  # a topic's limit is lower than the known one
            await self._pair_io.limits.refresh()
            await self._transactions.restart()
            for prompt in batch:
                await self._write_one(prompt)

    async def _write_one(self, prompt: PendingPrompt) -> None:
        """Commit one prompt; if its topics refuse the answer, commit an error that fits."""
        for steps in range(ERROR_STEPS + 1):
            try:
                return await self._write([prompt])
            except RecordTooLarge as error:
                stands = prompt.error or error
                prompt.sends = self._shared.submitter.error_records(prompt, stands, steps=steps)
                await self._transactions.restart()
        return await self._write([prompt])

    async def _write(self, batch: list[PendingPrompt]) -> None:
        submitter, progress = self._shared.submitter, self._progress
        offsets = {prompt.record.offset for prompt in batch}
        position = progress.position(offsets)
        tokens = self._tokens(offsets)
        if batch:
            self._prompt_reader.start_count = 0
        answered = progress.answered(offsets)
        note = self._prompt_reader.note(tokens, answered, progress.window_bytes, position)
        metadata = encode(note, position)
        await self._transactions.commit(
            [submitter.fitting(sending) for prompt in batch for sending in prompt.sends or ()],
            {self._place: CommittedOffset(position, metadata)},
            self._shared.group_id,
        )
        self._covered = set(tokens)
        progress.mark_answered(offsets)
        for prompt in batch:
            del self._under_way[prompt.record.offset]
            self._next_in_line(prompt)
        async with self._changed:
            self._changed.notify_all()

    def _tokens(self, answered_offsets: set[int]) -> dict[int, int]:
        """Return the offsets in `tokens` from which tokens of open and later prompts may lie."""
        places = self._shared.submitter.process.tokens.positions | self._inherited
        for offset, prompt in self._under_way.items():
            if offset not in answered_offsets:
                for partition, start in prompt.starts.items():
                    places[partition] = min(start, places.get(partition, start))
        return places

    def _next_in_line(self, prompt: PendingPrompt) -> None:
        key = prompt.record.key if self._pair_io.pair.ordered else None
        if key is None:
            return
        if line := self._lines[key]:
            self._spawn(self._ask(line.popleft()))
        else:
            del self._lines[key]

    # Records that Faust leaves out

    async def check_for_stall(self, end: int, stall_s: float) -> None:
        """Raise BrokerUnavailable if the partition has records up to `end` but none arrived for
        `stall_s`. If it has none there, only transaction markers, skip to `end`.
        """
        now_s, progress, begin = asyncio.get_running_loop().time(), self._progress, self._offset
        self._offset = progress.next_offset
        if self._taking or not self._ready.is_set() or not begin == self._offset < end:
            self._moved_s = now_s
        if now_s - self._moved_s < stall_s:
            return
        async for _ in self._log_reader.records(begin, end):
            if progress.next_offset == begin:
                raise BrokerUnavailable(f"{self._place}: records from {begin} on do not come")
            return
        progress.pass_over(end)
        if progress.position() == end:
            self._prompt_reader.start_count = 0
        await self._commit()
