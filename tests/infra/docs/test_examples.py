"""The example settings beside the pages are taken, and a page names each of them."""

from pathlib import Path

import pytest

from infra.stack.configuration import load
from streams.bridge.answers import AnswerBuilder
from streams.bridge.config import pairs_of
from tests.streams.bridge.samples import CODEC, KEY, body_of, question_of, record, stream

FOLDER = Path("infra/docs/examples")
PAGE = Path("infra/docs/integrate.md")


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_example_settings_load_and_are_documented(file: Path) -> None:
    assert f"examples/{file.name}" in PAGE.read_text() + (FOLDER / "reviews.toml").read_text()
    if file.suffix == ".toml":
        assert len(pairs_of(load(file, environ={}).bridge)) > 2


async def test_first_pair_answers_become_second_pair_prompts() -> None:
    first, second = load(FOLDER / "reviews.toml", environ={}).bridge.pairs
    review = {"id": 7, "text": "Fine, but late."}
    question = await question_of(review, first)
    answer_stream = stream('{"stars": 3, "why": "late"}')
    answers = AnswerBuilder(first, CODEC)
    when = {"asked_ms": 1, "first_token_ms": 2, "ended_ms": 3, "tries": 1}
    answer = await answers.answer(record(review), question, KEY, answer_stream, **when)
    second_question = await question_of(answers.sending(record(review), answer).value, second)
    assert body_of(second_question)["messages"][0]["content"].endswith("gave 3 stars because: late")
