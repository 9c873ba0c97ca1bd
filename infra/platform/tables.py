"""Creates and changes the tables of the demo: documents, and questions that get answers.

Times are the database's own, right after the commit; demo and database run on one machine.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from infra.handbook.library import TextDocument
from infra.platform.postgres import Postgres
from schemas.errors import EngineFailed

SOURCE_ROLE, SINK_ROLE = "changes", "answers"
DOCUMENTS_PUBLICATION, QUESTIONS_PUBLICATION = "documents_changes", "new_questions"
# An answer changes its question's row; if updates were published, it would be asked again.
SCHEMA = f"""
CREATE TABLE documents (id text PRIMARY KEY, title text NOT NULL, body text NOT NULL);
ALTER TABLE documents REPLICA IDENTITY FULL;
CREATE TABLE questions (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, question text NOT NULL,
  answer text, citations text, error text, answered_ms bigint
);
CREATE ROLE {SOURCE_ROLE} LOGIN REPLICATION;
GRANT SELECT ON documents, questions TO {SOURCE_ROLE};
CREATE PUBLICATION {DOCUMENTS_PUBLICATION} FOR TABLE documents;
CREATE PUBLICATION {QUESTIONS_PUBLICATION} FOR TABLE questions WITH (publish = 'insert');
CREATE ROLE {SINK_ROLE} LOGIN;
GRANT SELECT, UPDATE (answer, citations, error, answered_ms) ON questions TO {SINK_ROLE};
"""
# Fields of answers, and the columns that they fill.
COLUMNS = {
    "text": "answer",
    "citations": "citations",
    "error_message": "error",
    "ended_ms": "answered_ms",
}
_NOW = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class QuestionRow:
    """A row of `questions` whose columns were filled."""

    question: str
    answer: str
    error: str
    citations: Sequence[dict[str, Any]]
    waited_ms: float


class DemoTables:
    """The demo's tables of documents and questions, in one database."""

    def __init__(self, database: Postgres) -> None:
        self._database = database

    async def create(self) -> None:
        """Create the tables, the roles that read and write them, and the publications."""
        await self._database.sql(SCHEMA)

    async def insert(self, texts: Iterable[TextDocument]) -> int:
        """Insert documents; return the time of the commit, in ms since 1970."""
        rows = ", ".join(
            f"({quote_sql(text.document_id)}, {quote_sql(text.title)}, {quote_sql(text.text)})"
            for text in texts
        )
        return await self._change(f"INSERT INTO documents VALUES {rows};")

    async def edit(self, text: TextDocument) -> int:
        """Replace the text of a document; return the time of the commit, in ms since 1970."""
        where = f"WHERE id = {quote_sql(text.document_id)}"
        return await self._change(f"UPDATE documents SET body = {quote_sql(text.text)} {where};")

    async def delete(self, document_id: str) -> int:
        """Delete a document; return the time of the commit, in ms since 1970."""
        return await self._change(f"DELETE FROM documents WHERE id = {quote_sql(document_id)};")

    async def ask(self, questions: Iterable[str]) -> list[int]:
        """Insert new questions and return their ids."""
        rows = ", ".join(f"({quote_sql(question)})" for question in questions)
        id_rows = await self._database.sql(
            f"INSERT INTO questions (question) VALUES {rows} RETURNING id;"
        )
        return [int(row[0]) for row in id_rows]

    async def count_answered(self, ids: Sequence[int]) -> tuple[int, int]:
        """Count the questions with an answer or an error, and those with an error."""
        among = ", ".join(map(str, ids))
        rows = await self._database.sql(
            f"SELECT count(answered_ms), count(error) FROM questions WHERE id IN ({among});"
        )
        answered, failed = rows[0]
        return int(answered), int(failed)

    async def answer(self, question: str, within_s: float) -> QuestionRow:
        """Ask a question, and wait until its row is filled; raises EngineFailed if late."""
        began_s = time.monotonic()
        (number,) = await self.ask([question])
        while (await self.count_answered([number]))[0] == 0:
            if time.monotonic() - began_s > within_s:
                raise EngineFailed(f"no answer within {within_s:g} s to {question!r}")
            await asyncio.sleep(_POLL_S)
        waited_ms = (time.monotonic() - began_s) * 1000
        rows = await self._database.sql(
            "SELECT coalesce(answer, ''), coalesce(error, ''), coalesce(citations, '[]') "
            f"FROM questions WHERE id = {number};"
        )
        answer, error, citations = rows[0]
        return QuestionRow(question, answer, error, json.loads(citations), waited_ms)

    async def _change(self, statement: str) -> int:
        rows = await self._database.sql(f"{statement}\n{_NOW}")
        return int(rows[0][0])


def quote_sql(text: str) -> str:
    """Return the text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"
