"""Carries batches out: checks their files, asks their lines on `batch.prompts`, and makes files of
what comes on `batch.answers`.

One gateway does it for all: the first of those that live. Lines and parts of files are written in
transactions of one id, and so is the progress that tells of them. So the next gateway fences the
one before, and goes on from what is committed: no line is asked twice, and no answer is twice or
not at all in the files. A second answer to a line would change nothing either. Only so many lines
are ahead of their answers: that feeds the bridges, and leaves little to be dropped where a batch is
cancelled. Tenants take turns (`turns.py`), in places, in lines and in what is done next.
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
from schemas.log.clients import AssignedReader
from schemas.log.clock import wall_ms
from schemas.log.patience import TRANSIENT_ERRORS, retry_forever
from schemas.log.slices import in_slices
from schemas.log.transactions import OutgoingRecord, Transactions
from schemas.records import Answer, Batch, BatchProgress, FilePart, StoredFile
from schemas.settings import LogSettings
from schemas.topics import partition_of
from streams.gateway.batches.carried import Carried
from streams.gateway.batches.lines import FileCheck, Wrong, call_of
from streams.gateway.batches.reading import lines_of
from streams.gateway.batches.underway import Draft, Underway, wanted_end
from streams.gateway.ids import new_object_id
from streams.gateway.log.objects import PART_BYTES, ObjectLog, part_key
from streams.gateway.objects.batches import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    VALIDATING,
    line_key,
)
from streams.gateway.objects.table import key_of

logger = logging.getLogger(__name__)
ID, FENCE = "batches", "/batches"  # of the transactions; a key of `objects` that nothing has
CHUNK = 250  # lines of one transaction
AHEAD_BYTES = 2 << 20  # of lines that were read at once
ANSWERS = 200  # taken at once; between them calls get their turn
PACE_MS = 100  # between looks, where nothing comes
BUG = Wrong("server_error", "an error of the gateway; its log has the details")


class Carrier:
    """`run` until cancelled."""

    def __init__(
        self,
        log: LogSettings,
        codec: Codec,
        objects: ObjectLog,
        *,
        is_first: Callable[[], bool],
        check_model: Callable[[str], object],
    ) -> None:
        """`check_model` raises UnknownModel."""
        self._log, self._codec, self._objects = log, codec, objects
        self._is_first, self._check_model = is_first, check_model
        self._writer = Transactions(log, ID)
        self._carried = Carried()
        self._read_to: dict[int, int] = {}  # by partition of batch.answers

    async def run(self) -> None:
        """Over every trouble; a bug ends no gateway."""
        await retry_forever(self._follow, "batches", logger, errors=(Exception,))

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0), self._objects.news:
                    await self._objects.news.wait()
            if self._is_first() and self._objects.table.batches.unended_tenants():
                await self._carry()

    async def _carry(self) -> None:
        """Until no batch is left, or another gateway is the first."""
        self._writer = Transactions(self._log, ID)
        try:
            await self._writer.start([(f"{self._log.topic_prefix}objects", 0)])
            # Read again, it shows that the table has all that whoever had the id has committed.
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
                for each in self._carried:
                    for partition, offset in enumerate(each.committed.answers_from):
                        self._read_to[partition] = min(self._read_to[partition], offset)
                await reader.seek(self._read_to)
                await self._carry_with(reader)
        finally:
            self._carried.clear()
            await self._writer.stop()

    async def _carry_with(self, reader: AssignedReader) -> None:
        while self._is_first() and self._look():
            is_busy = False
            for tenant in self._carried.tenants():
                is_busy |= await self._step_of(tenant)
            wait_ms = 0 if is_busy else PACE_MS
            answers = await reader.batch(max_records=ANSWERS, timeout_ms=wait_ms)
            async for record in in_slices(answers):
                self._take(record)

    async def _remember(self) -> None:
        """Batches that had left their place, whoever carried them, with lines unanswered."""
        now_s, table = asyncio.get_running_loop().time(), self._objects.table.batches
        async for batch in in_slices(table.begun()):
            if (progress := table.progress(batch)) is not None:
                self._carried.remember(batch, progress, now_s)

    async def _step_of(self, tenant: str) -> bool:
        """Take the next step that costs something, of whichever batch of a tenant; if there is."""
        for each in self._carried.of(tenant):
            if not each.has_ended and await self._step(each):
                self._carried.has_had_turn(each)
                return True
        return False

    def _look(self) -> bool:
        """See what the table has; whether anything is to be done."""
        now_s = asyncio.get_running_loop().time()
        return self._carried.look(self._objects.table.batches, now_s)

    # One batch

    async def _step(self, each: Underway) -> bool:
        """Do what is next; whether there is more at once."""
        try:
            return await self._next(each)
        except (*TRANSIENT_ERRORS, OverloadError):
            raise  # it is tried again
        except Wrong as wrong:
            await self._end(each, FAILED, [wrong.told(None)])
        except Exception:
            logger.exception("%s: a bug", each.batch.batch_id)
            await self._end(each, FAILED, [BUG.told(None)])
        return False

    async def _next(self, each: Underway) -> bool:
        now_s, now_ms = asyncio.get_running_loop().time(), wall_ms()
        if each.committed.status == VALIDATING:
            if wanted := wanted_end(each.batch, now_ms):
                await self._end(each, wanted)
            else:
                await self._check(each)
            return True
        elif end := each.end(now_ms):
            if end == COMPLETED:
                await self._end(each, end)
            else:
                await self._give_up(each, end)
            return True
        elif self._carried.may_send(each, CHUNK):
            await self._send(each)
            return True
        if not each.has_ended and each.is_due(now_s, now_ms):
            await self._write(each)
        return False

    def _file(self, each: Underway) -> StoredFile:
        file = self._objects.table.batch_file(each.batch)
        if file is None:
            raise Wrong("invalid_file", "The file of the batch is not there any more.")
        return file

    async def _check(self, each: Underway) -> None:
        """Whether its file may be asked."""
        check, number = FileCheck(each.batch.endpoint, self._check_model), 0
        lines = lines_of(self._objects, self._file(each))
        try:
            async with contextlib.aclosing(lines):
                async for line in lines:
                    number = line.number
                    check.add(number, line.text)
                    if check.is_over:
                        break
        except Wrong as wrong:
            check.refuse(number + 1, wrong)
        if errors := check.errors:
            await self._end(each, FAILED, errors)
            return
        now_ms = wall_ms()
        progress = replace(
            each.committed,
            status=IN_PROGRESS,
            total=check.total,
            answers_from=self._positions(),
            output_file_id=new_object_id("file-", now_ms),
            error_file_id=new_object_id("file-", now_ms),
            started_ms=now_ms,
            at_ms=now_ms,
        )
        await self._commit(self._kept(progress))
        self._carried.put(Underway(each.batch, progress, asyncio.get_running_loop().time()))

    async def _send(self, each: Underway) -> None:
        """Ask some lines."""
        if not each.ahead:
            await self._read_ahead(each)
        sent, sends = each.committed.sent, list[OutgoingRecord]()
        chunk = [each.ahead.popleft() for _ in range(min(CHUNK, len(each.ahead)))]
        async for number, line in in_slices(enumerate(chunk, sent)):
            sends.append(self._prompt(each.batch, number, line.text))
        progress = replace(
            each.committed,
            sent=sent + len(chunk),
            sent_bytes=chunk[-1].end,
            at_ms=wall_ms(),
        )
        await self._commit(*sends, self._kept(progress))
        each.sent(progress, [len(line.text) for line in chunk])

    async def _read_ahead(self, each: Underway) -> None:
        size, most = 0, each.committed.total - each.committed.sent
        lines = lines_of(self._objects, self._file(each), each.committed.sent_bytes)
        async with contextlib.aclosing(lines):
            async for line in lines:
                each.ahead.append(line)
                size += len(line.text)
                if size > AHEAD_BYTES or len(each.ahead) == most:
                    break

    def _prompt(self, batch: Batch, number: int, text: bytes) -> OutgoingRecord:
        call = call_of(text)
        return OutgoingRecord(
            topic=self._log.topic_prefix + "batch.prompts",
            # Not by its number alone: who writes a file would choose the partition of large lines.
            partition=partition_of(f"{batch.batch_id}/{number}", self._log.prompt_partitions),
            key=line_key(batch, number, call.custom_id).encode(),
            value=self._codec.encode(call.prompt(batch.endpoint)),
        )

    def _take(self, record: ConsumerRecord) -> None:
        """One of the answers."""
        self._read_to[record.partition] = record.offset + 1
        names = (record.key or b"").decode(errors="replace").split("/", 3)
        each = self._carried.get("/".join(names[:2]))
        if each is None or each.has_ended or len(names) < 4 or not record.value:
            return
        try:
            answer = self._codec.decode(record.value)
            if not isinstance(answer, Answer):
                raise RecordError(f"expected an Answer, found {type(answer).__name__}")
            each.take(int(names[2]), names[3], answer)
        except (RecordError, ValueError) as error:
            logger.error("%s[%d]@%d: %s", record.topic, record.partition, record.offset, error)

    async def _give_up(self, each: Underway, status: str) -> None:
        """What is not answered is in the file of errors, too."""
        lines, number = lines_of(self._objects, self._file(each)), 0
        async with contextlib.aclosing(lines):
            async for line in lines:
                if number < each.committed.total and not each.is_answered(number):
                    each.give_up(number, call_of(line.text).custom_id, status)
                number += 1
                if each.pending_bytes >= PART_BYTES:
                    await self._write(each)
        await self._end(each, status)

    # What is written

    async def _write(self, each: Underway) -> None:
        """Results so far, and that they are."""
        await self._write_parts(each)
        progress = each.progress(self._positions(), wall_ms())
        await self._commit(self._kept(progress))
        each.committed = progress

    async def _write_parts(self, each: Underway) -> None:
        for draft in (each.output, each.errors):
            sends = [
                self._part(draft, len(draft.offsets) + number, data)
                for number, data in enumerate(draft.parts())
            ]
            draft.written(await self._commit(*sends) if sends else ())
        each.written(asyncio.get_running_loop().time())

    def _part(self, draft: Draft, number: int, data: bytes) -> OutgoingRecord:
        """The next gateway may write it again; one of both stays, the last."""
        part = FilePart(file_id=draft.file_id, number=number, data=data)
        return OutgoingRecord(
            topic=self._log.topic_prefix + "files",
            partition=self._objects.partition(draft.file_id),
            key=part_key(draft.file_id, number).encode(),
            value=self._codec.encode(part),
        )

    async def _end(self, each: Underway, status: str, errors: Sequence[object] = ()) -> None:
        """It is over, and callers find its files."""
        await self._write_parts(each)
        now_ms, files = wall_ms(), list[StoredFile]()
        for name, draft in (("output", each.output), ("error", each.errors)):
            if draft.size:
                partition = self._objects.partition(draft.file_id)
                files.append(draft.stored(each.batch, name, partition, now_ms))
        progress = replace(
            each.progress(self._positions(), now_ms),
            status=status,
            errors=orjson.dumps(errors).decode() if errors else "",
            finalizing_ms=now_ms if status != FAILED else 0,
            ended_ms=now_ms,
        )
        await self._commit(*map(self._kept, files), self._kept(progress))
        each.committed = progress

    def _positions(self) -> tuple[int, ...]:
        return tuple(offset for _, offset in sorted(self._read_to.items()))

    def _kept(self, record: BatchProgress | StoredFile) -> OutgoingRecord:
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
