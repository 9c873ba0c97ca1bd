"""Where a server is looked for, and that one of our own is gone with its folder."""

from pathlib import Path

import pytest

from infra.handbook.library import TextDocument
from infra.platform import postgres
from infra.platform.postgres import Postgres, binaries
from infra.platform.tables import DemoTables, quote_sql
from infra.processes.identity import identify
from schemas.errors import ConfigError
from tests.waits import run


def has(root: Path, *folders: str) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "postgres").touch()
    return root


def test_postgres_lookup_prefers_newest_version(tmp_path: Path) -> None:
    debian = [f"usr/lib/postgresql/{version}/bin" for version in (9, 15, 17)]
    assert binaries(has(tmp_path, *debian)) == tmp_path / debian[-1]


def test_postgres_lookup_prefers_unpacked_server(tmp_path: Path) -> None:
    unpacked = has(tmp_path / "build", "usr/lib/postgresql/15/bin")
    installed = has(tmp_path / "root", "usr/pgsql-17/bin")
    assert binaries(unpacked, installed).is_relative_to(unpacked)
    assert binaries(tmp_path / "none", installed).is_relative_to(installed)


def test_postgres_lookup_error_names_package(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="apt-get install postgresql.*without root: `make "):
        binaries(tmp_path)


def test_sql_quoting_escapes_single_quotes() -> None:
    assert quote_sql("it's; a \\ --\n") == "'it''s; a \\ --\n'"


@pytest.mark.platform
def test_postgres_stores_rows_and_leaves_no_process_or_folder() -> None:
    async def scenario() -> None:
        async with Postgres() as database:
            tables = DemoTables(database)
            await tables.create()
            text = "it's\na \\ text with \x1d"
            assert await tables.insert([TextDocument("a", text, "T")]) <= await tables.edit(
                TextDocument("b", "x")
            )
            assert await database.sql("SELECT id, body FROM documents") == [["a", text]]
            assert await tables.ask(["q1", "q2"]) == [1, 2]
            assert await tables.count_answered([1, 2]) == (0, 0)
            await tables.delete("a")
            assert await database.sql("SELECT id FROM documents") == []
            with pytest.raises(ConfigError, match="no_table"):
                await database.sql("SELECT * FROM no_table")
            server = database._supervisor.processes[postgres._NAME].pid
            assert identify(server) is not None
        assert identify(server) is None
        assert not database.folder.exists()

    run(scenario())
