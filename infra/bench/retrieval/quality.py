"""Measures the share of right answers with the documents, without them, and with wrong ones.

Asks the same held-out questions with handbooks of several sizes; a third of the questions are
paraphrased. With wrong passages the search is for another question, so the model reads passages
that do not help; its right answers then do not come from them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.progress import Progress

from infra.handbook.handbook import HandbookQuestion, handbook, questions
from infra.handbook.library import Library, TextDocument
from schemas.errors import EngineFailed

WITH, WITHOUT, WRONG = "with documents", "without", "with wrong passages"
_ANSWER_TOKENS = 32
_FOUND_S = 600.0


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """Whether one question was answered right, and its passages."""

    question: HandbookQuestion
    is_right: bool
    is_cited: bool  # whether the page with the answer is in the prompt
    tokens: int  # of the passages in the prompt


class Questioner:
    """Asks one model through one gateway, `streams` questions at a time."""

    def __init__(
        self, client: httpx.AsyncClient, model: str, streams: int, progress: Progress
    ) -> None:
        self._client, self._model = client, model
        self._slots, self._progress = asyncio.Semaphore(streams), progress

    async def ask_all(
        self, collection: str, questions: Sequence[HandbookQuestion], way: str
    ) -> list[JudgedAnswer]:
        """Ask every question once, as many at a time as there are streams."""
        task = self._progress.add_task(f"{collection}, {way}", total=len(questions))
        shifted = [*questions[len(questions) // 2 :], *questions[: len(questions) // 2]]

        async def ask(question: HandbookQuestion, decoy: HandbookQuestion) -> JudgedAnswer:
            body: dict[str, Any] = {
                "model": self._model,
                "messages": [{"role": "user", "content": question.text}],
                "max_tokens": _ANSWER_TOKENS,
                "temperature": 0,
            }
            if way != WITHOUT:
                body["retrieval"] = {"collection": collection}
            if way == WRONG:
                body["retrieval"]["query"] = decoy.text
            async with self._slots:
                response = await self._client.post("/v1/chat/completions", json=body)
            self._progress.advance(task)
            return _judge(question, response)

        return list(await asyncio.gather(*map(ask, questions, shifted)))


def _judge(question: HandbookQuestion, response: httpx.Response) -> JudgedAnswer:
    answer = response.json()
    if response.status_code != 200:
        raise EngineFailed(f"the gateway answered: {answer['error']['message']}")
    retrieval = answer["trivium"].get("retrieval", {})
    cited = {citation["document_id"] for citation in retrieval.get("citations", ())}
    return JudgedAnswer(
        question,
        question.is_right(answer["choices"][0]["message"]["content"]),
        question.document_id in cited,
        retrieval.get("tokens", 0),
    )


def figures(answers: Sequence[JudgedAnswer]) -> dict[str, float]:
    """Return the shares of right answers and of questions whose page was found."""
    paraphrased = [answer for answer in answers if answer.question.is_paraphrased]
    return {
        "right": _share([answer.is_right for answer in answers]),
        "right_paraphrased": _share([answer.is_right for answer in paraphrased]),
        "page_found": _share([answer.is_cited for answer in answers]),
        "page_found_paraphrased": _share([answer.is_cited for answer in paraphrased]),
        "tokens_put_in": sum(answer.tokens for answer in answers) / max(1, len(answers)),
        "questions": len(answers),
    }


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


async def measure(
    books: Library, questioner: Questioner, sizes: Sequence[int], count: int, seed: int
) -> Mapping[str, Mapping[str, Any]]:
    """Return figures by size and way. Only answers with documents depend on the size."""
    by_size: dict[str, Mapping[str, Any]] = {}
    sample = questions(handbook(min(sizes)), count, seed=seed)
    for size in sizes:
        collection = f"handbook-{size}"
        pages = [TextDocument(page.document_id, page.text, page.title) for page in handbook(size)]
        await books.put(collection, pages)
        await books.wait_for_all(collection, pages, _FOUND_S)
        ways = (WITH, WITHOUT, WRONG) if size == sizes[0] else (WITH,)
        by_size[str(size)] = {
            way: figures(await questioner.ask_all(collection, sample, way)) for way in ways
        }
    return by_size
