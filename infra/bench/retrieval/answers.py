"""Parts of the retrieval benchmark with a real model: what documents do for its answers.

`quality`: the share of right answers with the documents, without them, and with wrong passages.
Asks the same held-out questions with handbooks of several sizes; a third of the questions are
paraphrased. With wrong passages the search is for another question, so right answers then do not
come from them. `probes`: tokens/s of answers with a search every 32 tokens and without, and stalls
of decoding. `early`: TTFT of a long prompt whose fixed part is computed during a search, beside the
same kind of prompt without a search, and a search alone. Ways take turns, so that load on the
machine affects all alike.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.bench.benchmark import counting
from infra.bench.results import Bar, at_least, at_most, median
from infra.bench.retrieval.scene import Figures, Scene, citations, page_texts
from infra.handbook.handbook import HandbookQuestion, handbook, questions
from schemas.errors import EngineFailed

WITH, WITHOUT, WRONG = "with documents", "without", "with wrong passages"
EVERY = 32
NONE, USUAL = "without probes", f"every {EVERY} tokens"
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    NONE: None,
    USUAL: {"every": EVERY},
    "lookahead off": {"every": EVERY, "lookahead": 0},
    "each starts anew": {"every": EVERY, "warm": False},
}
PROMPT, SEARCH, BOTH = "prompt alone", "search alone", "both"
_ANSWER_TOKENS, _WARM_TOKENS = 32, 8
_PAGES, _PATIENCE_S = 100, 60.0
_WORDS = 900  # of the fixed part of a prompt; about 1 200 tokens


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """Whether one question was answered right, and its passages."""

    question: HandbookQuestion
    is_right: bool
    is_cited: bool  # whether the page with the answer is in the prompt
    tokens: int  # of the passages in the prompt


async def quality(scene: Scene) -> Figures:
    """Return figures by size and way. Only answers with documents depend on the size."""
    options, by_size = scene.options, Figures()
    sample = questions(handbook(min(options.sizes)), options.questions, seed=options.seed)
    for size in options.sizes:
        collection = f"handbook-{size}"
        await scene.put(collection, page_texts(size))
        ways = (WITH, WITHOUT, WRONG) if size == options.sizes[0] else (WITH,)
        by_size[str(size)] = {
            way: quality_figures(await _ask_all(scene, collection, sample, way)) for way in ways
        }
    return by_size


async def _ask_all(
    scene: Scene, collection: str, sample: Sequence[HandbookQuestion], way: str
) -> list[JudgedAnswer]:
    """Ask every question once, as many at a time as there are streams."""
    progress = counting(f"{collection}, {way}", len(sample))
    slots = asyncio.Semaphore(scene.options.streams)
    shifted = [*sample[len(sample) // 2 :], *sample[: len(sample) // 2]]

    async def ask(question: HandbookQuestion, decoy: HandbookQuestion) -> JudgedAnswer:
        query = {"query": decoy.text} if way == WRONG else {}
        fields = {} if way == WITHOUT else {"retrieval": {"collection": collection, **query}}
        async with slots:
            answer, _ = await scene.chat(question.text, max_tokens=_ANSWER_TOKENS, **fields)
        progress(advance=1)
        return JudgedAnswer(
            question,
            question.is_right(answer["choices"][0]["message"]["content"]),
            question.document_id in {citation["document_id"] for citation in citations(answer)},
            answer["trivium"].get("retrieval", {}).get("tokens", 0),
        )

    return list(await asyncio.gather(*map(ask, sample, shifted)))


def quality_figures(answers: Sequence[JudgedAnswer]) -> dict[str, float]:
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


def quality_bars(sizes: Figures) -> list[Bar]:
    """Return the bar for right answers with 300 pages, or with the first size."""
    size = "300" if "300" in sizes else next(iter(sizes))
    return [at_least(f"right answers, {size} pages", sizes[size][WITH]["right"], 0.85, "share")]


async def probes(scene: Scene) -> Figures:
    """Return by way: tokens/s of all streams at once, and the stalled share of decoding."""
    options, streams = scene.options, scene.options.streams
    await scene.put("probes", page_texts(_PAGES))
    sample = questions(handbook(_PAGES), streams * options.rounds, seed=options.seed)
    rows_by_way: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    progress = counting("probes", (options.rounds + 1) * len(WAYS))
    for number in range(options.rounds + 1):
        texts = [q.text for q in sample[max(0, number - 1) * streams :][:streams]]
        for way, fields in WAYS.items():
            tokens = options.answer_tokens if number else _WARM_TOKENS
            row = await _round(scene, texts, tokens, fields)
            if number:  # the first round warms the engine and the pool
                rows_by_way[way].append(row)
            progress(advance=1)
    return {
        way: {name: median([row[name] for row in rows]) for name in rows[0]}
        for way, rows in rows_by_way.items()
    }


async def _round(
    scene: Scene, texts: Sequence[str], tokens: int, fields: Mapping[str, Any] | None
) -> dict[str, float]:
    retrieval = {"collection": "probes"} | ({} if fields is None else {"probes": fields})
    began_s = time.monotonic()
    asking = (
        scene.chat(text, max_tokens=tokens, ignore_eos=True, retrieval=retrieval) for text in texts
    )
    answers = [answer for answer, _ in await asyncio.gather(*asking)]
    took_s = time.monotonic() - began_s
    reports = [answer["trivium"] for answer in answers]
    stalled_ms = sum(report.get("stalled_ms", 0.0) for report in reports)
    cited = [citation for answer in answers for citation in citations(answer)]
    return {
        "tokens_per_s": sum(a["usage"]["completion_tokens"] for a in answers) / took_s,
        "stalled_share": stalled_ms / (len(texts) * took_s * 1000),
        "probes": sum(report.get("probes", 0) for report in reports),
        "put_in": sum(bool(citation.get("probe")) for citation in cited),
    }


def probe_bars(figures: Figures) -> list[Bar]:
    """Return bars: nine tenths of the rate without probes, and few stalls."""
    ratio = figures[USUAL]["tokens_per_s"] / figures[NONE]["tokens_per_s"]
    return [
        at_least(f"tokens/s with probes every {EVERY} beside none", ratio, 0.9, "x"),
        at_most("decode time stalled by probes", figures[USUAL]["stalled_share"], 0.05, "share"),
    ]


async def early(scene: Scene) -> Figures:
    """Return the median ms of each way, and the median tokens of the prompts. Each prompt is new,
    so no cache has it."""
    options, pages = scene.options, page_texts(_PAGES)
    await scene.put("early", pages)
    rng = random.Random(f"early {options.seed}")
    words = " ".join(page.text for page in pages).split()
    sample = questions(handbook(_PAGES), options.prompts + 1, seed=options.seed)
    times: dict[str, list[float]] = {PROMPT: [], SEARCH: [], BOTH: []}
    tokens: list[float] = []
    progress = counting("early prefill", 3 * len(sample))

    async def first_token(question: HandbookQuestion, **fields: Any) -> tuple[float, int]:
        """Return the ms of a call for one token, and the tokens of its prompt."""
        fixed = " ".join(rng.choices(words, k=_WORDS))
        answer, took_ms = await scene.chat(fixed, question.text, max_tokens=1, **fields)
        if "error" in answer["trivium"].get("retrieval", {}):
            raise EngineFailed(f"expected an answer with its search, found {answer}")
        progress(advance=1)
        return took_ms, answer["usage"]["prompt_tokens"]

    for number, question in enumerate(sample):
        prompt_ms, prompt_tokens = await first_token(question)
        search_ms = await scene.search_ms(question.text, "early", "prefill", _PATIENCE_S)
        progress(advance=1)
        both_ms, _ = await first_token(question, retrieval={"collection": "early"})
        if number:  # the first one warms models
            tokens.append(prompt_tokens)
            for way_ms, took_ms in zip(
                times.values(), (prompt_ms, search_ms, both_ms), strict=True
            ):
                way_ms.append(took_ms)
    medians = {way: median(way_ms) for way, way_ms in times.items()}
    return {"ms": medians, "prompt_tokens": median(tokens), "prompts": options.prompts}


def early_bars(figures: Figures) -> list[Bar]:
    """Return the bar: hardly more than the slower part alone."""
    ms = figures["ms"]
    ratio = ms[BOTH] / max(ms[PROMPT], ms[SEARCH])
    return [at_most("TTFT of a long prompt with a search", ratio, 1.05, "x the slower part")]
