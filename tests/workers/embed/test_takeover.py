"""Workers die and others go on: every document ends with its passages, once."""

import pytest

from schemas.records import MemberState
from schemas.settings import LogSettings
from tests.long_leases import long_leases
from tests.waits import until
from tests.workers.embed.bookshelf import CODEC, bookshelf, process, worker

pytestmark = pytest.mark.kafka
COUNT = 300


async def test_embedding_worker_takes_over_partitions_of_killed_worker(kafka: LogSettings) -> None:
    """Each document then has exactly one current record."""
    with long_leases(), process(kafka, "victim") as victim:
        async with bookshelf(kafka) as books, worker(kafka, "heir") as heir:
            members = heir.membership.view.members
            await until(lambda: "victim" in members)
            await until(lambda: members["victim"].state is MemberState.READY)
            await until(lambda: len(heir._intake.group.owned) == 2)  # a partition of each topic

            def by_victim() -> int:
                load = members["victim"].embedding
                return load.documents_total if load else 0

            for number in range(COUNT):
                await books.put(f"d{number}", f"Version one of number {number}.")
            await until(lambda: by_victim() > 0)
            for number in range(0, COUNT, 2):
                await books.put(f"d{number}", f"Version two of number {number}.")
                if number == COUNT // 2:
                    victim.kill()
            await until(lambda: len(heir._intake.group.owned) == 4)

            async def are_all_there() -> bool:
                by_key = await books.passages()
                versions = [by_key.get(f"books/d{number}") for number in range(COUNT)]
                return all(
                    version is not None
                    and version.chunks[0].text == f"Version {word} of number {n}."
                    for n, version in enumerate(versions)
                    for word in ("one" if n % 2 else "two",)
                )

            await until(are_all_there)
            latest: dict[bytes, int] = {}
            for record in await books.records("passages"):
                passages = CODEC.decode(record.value)
                latest[record.key] = passages.documents_offset
            newest: dict[bytes, int] = {}
            for record in await books.records("documents"):
                newest[record.key] = record.offset
            assert latest == newest, "the last record of each is of its document's last change"
