"""Runs batches: checks their files, sends their lines to `batch.prompts`, and stores the answers.

One gateway does it for all: the first of those that are alive. Lines and parts of files are written
in transactions of one id, together with the progress that counts them. So the next gateway fences
the one before, and continues from what is committed: no line is sent twice, and each answer is in
the files exactly once. A second answer to a line would change nothing either. The number of lines
without an answer is bounded: it is enough for the bridges, and little is lost if a batch is
cancelled. Tenants take turns (`turns.py`) with slots, lines and steps.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import orjson
from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, OverloadError, RecordError
from schemas.records import Answer, Batch, BatchProgress, FilePart, StoredFile
from schemas.settings import LogSettings
from schemas.topics import partition_of
from streams.calls.ids import new_object_id
from streams.log.clients import AssignedReader
from streams.log.clock import wall_ms
from streams.log.retry import TRANSIENT_ERRORS, retry_forever
from streams.log.slices import in_slices
from streams.log.transactions import OutgoingRecord, Transactions
from streams.openai.batches.batch_run import BatchRun, Draft, early_end_status
from streams.openai.batches.batch_runs import BatchRuns
from streams.openai.batches.lines import BatchFileError, FileCheck, call_of, lines_of
from streams.openai.objects.batches import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    VALIDATING,
    line_key,
)
from streams.openai.objects.log import PART_BYTES, ObjectLog, part_key
from streams.openai.objects.table import key_of

logger = logging.getLogger(__name__)
ID, FENCE = "batches", "/batches"  # id of the transactions; a key of `objects` that no object has
CHUNK = 250  # lines of one transaction
AHEAD_BYTES = 2 << 20  # bytes of lines that are read at once
ANSWERS = 200  # per batch of records; other tasks run between batches
PACE_MS = 100  # longest wait for answers if there is nothing to do
BUG = BatchFileError("server_error", "an error of the gateway; its log has the details")


class BatchRunner:
    """Runs the batches of all tenants; `run` ends when it is cancelled."""

    def __init__(
        self,
        log: LogSettings,
        codec: Codec,
        objects: ObjectLog,
        *,
        is_first: Callable[[], bool],
        check_model: Callable[[str], object],
    ) -> None:
        """Set up the runner; `check_model` raises UnknownModel."""
        self._log, self._codec, self._objects = log, codec, objects
        self._is_first, self._check_model = is_first, check_model
        self._writer = Transactions(log, ID)
        self._runs = BatchRuns()
        self._read_to: dict[int, int] = {}  # by partition of batch.answers

    async def run(self) -> None:
        """Run batches until cancelled. After any error, even a bug, it starts again."""
        await retry_forever(self._follow, "batches", logger, errors=(Exception,))

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0), self._objects.news:
                    await self._objects.news.wait()
            if self._is_first() and self._objects.table.batches.open_tenants():
                await self._run_batches()

    async def _run_batches(self) -> None:
        """Run batches until none is left, or until another gateway is the first."""
        self._writer = Transactions(self._log, ID)
        try:
            await self._writer.start([(f"{self._log.topic_prefix}objects", 0)])
            # Once this is read again, the table has all that the predecessor has committed.
            await self._objects.drop(FENCE)
            partitions = range(self._log.prompt_partitions)
            name = f"{self._log.topic_prefix}batch-answers"
            reader = AssignedReader(
                self._log, "batch.answers", partitions, client_id=name, committed_only=True
            )
            async with reader.reading("latest"):
                self._read_to = await reader.end_offsets()
                self._look()
                await self._remember()
                for run in self._runs:
                    for partition, offset in enumerate(run.committed.answers_from):
                        self._read_to[partition] = min(self._read_to[partition], offset)
                await reader.seek(self._read_to)
                await self._run_with(reader)
        finally:
            self._runs.clear()
            await self._writer.stop()

    async def _run_with(self, reader: AssignedReader) -> None:
        while self._is_first() and self._look():
            is_busy = False
            for tenant in self._runs.tenants():
                is_busy |= await self._step_of(tenant)
            wait_ms = 0 if is_busy else PACE_MS
            answers = await reader.batch(max_records=ANSWERS, timeout_ms=wait_ms)
            async for record in in_slices(answers):
                self._take(record)

    async def _remember(self) -> None:
        """Restore the runs that had left their slots with unanswered lines, at any gateway."""
        now_s, table = asyncio.get_running_loop().time(), self._objects.table.batches
        async for batch in in_slices(table.started_batches()):
            if (progress := table.progress(batch)) is not None:
                self._runs.remember(batch, progress, now_s)

    async def _step_of(self, tenant: str) -> bool:
        """Take the next costly step of one of a tenant's batches; return whether there was one."""
        for run in self._runs.of_tenant(tenant):
            if not run.has_ended and await self._step(run):
                self._runs.move_to_back(run)
                return True
        return False

    def _look(self) -> bool:
        """Read the table; return whether any batch is open."""
        now_s = asyncio.get_running_loop().time()
        return self._runs.refresh(self._objects.table.batches, now_s)

    # One batch

    async def _step(self, run: BatchRun) -> bool:
        """Take the next step of a batch; return whether the next one can follow at once."""
        try:
            return await self._next(run)
        except (*TRANSIENT_ERRORS, OverloadError):
            raise  # it is retried
        except BatchFileError as wrong:
            await self._end(run, FAILED, [wrong.as_json(None)])
        except Exception:
            logger.exception("%s: a bug", run.batch.batch_id)
            await self._end(run, FAILED, [BUG.as_json(None)])
        return False

    async def _next(self, run: BatchRun) -> bool:
        now_s, now_ms = asyncio.get_running_loop().time(), wall_ms()
        if run.committed.status == VALIDATING:
            if status := early_end_status(run.batch, now_ms):
                await self._end(run, status)
            else:
                await self._check(run)
            return True
        elif end := run.end_status(now_ms):
            if end == COMPLETED:
                await self._end(run, end)
            else:
                await self._give_up(run, end)
            return True
        elif self._runs.may_send(run, CHUNK):
            await self._send(run)
            return True
        if not run.has_ended and run.is_due(now_s, now_ms):
            await self._write(run)
        return False

    def _file(self, run: BatchRun) -> StoredFile:
        file = self._objects.table.batch_file(run.batch)
        if file is None:
            raise BatchFileError("invalid_file", "The file of the batch is not there any more.")
        return file

    async def _check(self, run: BatchRun) -> None:
        """Check the input file; start the batch, or fail it."""
        check, number = FileCheck(run.batch.endpoint, self._check_model), 0
        lines = lines_of(self._objects, self._file(run))
        try:
            async with contextlib.aclosing(lines):
                async for line in lines:
                    number = line.number
                    check.add(number, line.text)
                    if check.is_over:
                        break
        except BatchFileError as wrong:
            check.refuse(number + 1, wrong)
        if errors := check.errors:
            await self._end(run, FAILED, errors)
            return
        now_ms = wall_ms()
        progress = replace(
            run.committed,
            status=IN_PROGRESS,
            total=check.total,
            answers_from=self._positions(),
            output_file_id=new_object_id("file-", now_ms),
            error_file_id=new_object_id("file-", now_ms),
            started_ms=now_ms,
            at_ms=now_ms,
        )
        await self._commit(self._object(progress))
        self._runs.put(BatchRun(run.batch, progress, asyncio.get_running_loop().time()))

    async def _send(self, run: BatchRun) -> None:
        """Send the next lines of a batch as prompts."""
        if not run.buffered_lines:
            await self._read_ahead(run)
        first_line, sends = run.committed.sent_lines, list[OutgoingRecord]()
        chunk = [run.buffered_lines.popleft() for _ in range(min(CHUNK, len(run.buffered_lines)))]
        async for number, line in in_slices(enumerate(chunk, first_line)):
            sends.append(self._prompt(run.batch, number, line.text))
        progress = replace(
            run.committed,
            sent_lines=first_line + len(chunk),
            sent_bytes=chunk[-1].end,
            at_ms=wall_ms(),
        )
        await self._commit(*sends, self._object(progress))
        run.mark_sent(progress, [len(line.text) for line in chunk])

    async def _read_ahead(self, run: BatchRun) -> None:
        size, lines_left = 0, run.committed.total - run.committed.sent_lines
        lines = lines_of(self._objects, self._file(run), run.committed.sent_bytes)
        async with contextlib.aclosing(lines):
            async for line in lines:
                run.buffered_lines.append(line)
                size += len(line.text)
                if size > AHEAD_BYTES or len(run.buffered_lines) == lines_left:
                    break

    def _prompt(self, batch: Batch, number: int, text: bytes) -> OutgoingRecord:
        call = call_of(text)
        return OutgoingRecord(
            topic=self._log.topic_prefix + "batch.prompts",
            # Not by its number alone: callers could choose the partition of large lines.
            partition=partition_of(f"{batch.batch_id}/{number}", self._log.prompt_partitions),
            key=line_key(batch, number, call.custom_id).encode(),
            value=self._codec.encode(call.prompt(batch.endpoint)),
        )

    def _take(self, record: ConsumerRecord) -> None:
        """Take the answer that a record carries."""
        self._read_to[record.partition] = record.offset + 1
        names = (record.key or b"").decode(errors="replace").split("/", 3)
        run = self._runs.get("/".join(names[:2]))
        if run is None or run.has_ended or len(names) < 4 or not record.value:
            return
        try:
            answer = self._codec.decode(record.value)
            if not isinstance(answer, Answer):
                raise RecordError(f"expected an Answer, found {type(answer).__name__}")
            run.take_answer(int(names[2]), names[3], answer)
        except (RecordError, ValueError) as error:
            logger.error("%s[%d]@%d: %s", record.topic, record.partition, record.offset, error)

    async def _give_up(self, run: BatchRun, status: str) -> None:
        """Write errors for all lines without an answer, and end the batch."""
        lines, number = lines_of(self._objects, self._file(run)), 0
        async with contextlib.aclosing(lines):
            async for line in lines:
                if number < run.committed.total and not run.is_answered(number):
                    run.give_up(number, call_of(line.text).custom_id, status)
                number += 1
                if run.pending_bytes >= PART_BYTES:
                    await self._write(run)
        await self._end(run, status)

    # Writes to the log

    async def _write(self, run: BatchRun) -> None:
        """Write the results so far, and the progress that counts them."""
        await self._write_parts(run)
        progress = run.progress(self._positions(), wall_ms())
        await self._commit(self._object(progress))
        run.committed = progress

    async def _write_parts(self, run: BatchRun) -> None:
        for draft in (run.output, run.errors):
            sends = [
                self._part(draft, len(draft.offsets) + number, data)
                for number, data in enumerate(draft.parts())
            ]
            draft.mark_written(await self._commit(*sends) if sends else ())
        run.mark_written(asyncio.get_running_loop().time())

    def _part(self, draft: Draft, number: int, data: bytes) -> OutgoingRecord:
        """Build the record of a part. The next gateway may write it again; the last one stays."""
        part = FilePart(file_id=draft.file_id, number=number, data=data)
        return OutgoingRecord(
            topic=self._log.topic_prefix + "files",
            partition=self._objects.partition(draft.file_id),
            key=part_key(draft.file_id, number).encode(),
            value=self._codec.encode(part),
        )

    async def _end(self, run: BatchRun, status: str, errors: Sequence[object] = ()) -> None:
        """End the batch with a status, and publish its files."""
        await self._write_parts(run)
        now_ms, files = wall_ms(), list[StoredFile]()
        for name, draft in (("output", run.output), ("error", run.errors)):
            if draft.size:
                partition = self._objects.partition(draft.file_id)
                files.append(draft.stored_file(run.batch, name, partition, now_ms))
        progress = replace(
            run.progress(self._positions(), now_ms),
            status=status,
            errors=orjson.dumps(errors).decode() if errors else "",
            finalizing_ms=now_ms if status != FAILED else 0,
            ended_ms=now_ms,
        )
        await self._commit(*map(self._object, files), self._object(progress))
        run.committed = progress

    def _positions(self) -> tuple[int, ...]:
        return tuple(offset for _, offset in sorted(self._read_to.items()))

    def _object(self, record: BatchProgress | StoredFile) -> OutgoingRecord:
        return OutgoingRecord(
            topic=self._log.topic_prefix + "objects",
            partition=0,
            key=key_of(record).encode(),
            value=self._codec.encode(record),
        )

    async def _commit(self, *sends: OutgoingRecord) -> list[int]:
        offsets = await self._writer.commit(sends)
        if min(offsets) < 0:
            raise BrokerUnavailable("batches: the log did not tell where it put a record")
        return offsets
