"""The checker sees what is missing, double, out of place, wrong or late."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from infra.bench.faults import checker
from infra.bench.faults.checker import (
    AnswerOracle,
    RecordDecoder,
    check_answers,
    check_frames,
    check_outcomes,
    difference,
    expected_of,
)
from infra.bench.faults.history import stalls
from infra.bench.faults.verdict import history_task
from infra.stack.configuration import Settings
from infra.stack.engine_alone import generate_answers as answers_alone
from infra.stack.engine_source import start_engine
from schemas.codec import AVRO_DIR, Codec
from schemas.records import Role, Sampling
from schemas.rules.tokens import pack_tokens
from schemas.settings import ModelSettings
from tests.schemas.examples import example
from tests.workers.llm.engines import collected, job, start_sim

WORDS = [(7, " a"), (8, " b"), (9, " c")]
ENGINE = AnswerOracle(4, WORDS)
SAMPLING = {"seed": None, "temperature": 0.0, "max_tokens": 9}
PROMPT = pack_tokens([3, 1, 4, 1, 5])
RIGHT = ENGINE.answer(PROMPT, SAMPLING)
EXPECTED = {"r1": RIGHT}


def request(**fields: Any) -> dict[str, Any]:
    return {"sampling": SAMPLING, "prompt_tokens": PROMPT, "retrieval": None, **fields}


def work(attempt: int = 1, prompt: bytes = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"request_id": "r1", "attempt": attempt, "prompt_tokens": prompt, **fields}


def outcome(attempt: int = 1, kind: str = "completed", tokens: int = 9) -> dict[str, Any]:
    return {"request_id": "r1", "attempt": attempt, "kind": kind, "error": None,
            "completion_tokens": tokens}  # fmt: skip


def frame(first: int, last: int, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    row = RIGHT[first:last]
    columns = {"request_ids": ["r1"], "attempts": [attempt], "first_seqs": [first]}
    return {**columns, "token_counts": [len(row)], "token_ids": row, "texts": [ENGINE.text(row)],
            "ends": [], **fields}  # fmt: skip


def test_check_frames_skips_requests_of_other_tenants() -> None:
    odd = frame(2, 5, token_ids=[7, 7, 7])
    assert check_frames([odd], {}, ENGINE)["wrong"]["count"] == 1
    findings = check_frames([odd], {}, ENGINE, {"r1"})
    assert (
        findings["rows"] == 0 and not findings["wrong"]["count"] and not findings["gaps"]["count"]
    )


def answer(tokens: list[int], status: str = "whole", **fields: Any) -> dict[str, Any]:
    base_fields = {"request_id": "r1", "number": 1, "ended": status, "detail": "", "resumes": 0}
    return {**base_fields, "token_ids": tokens, "text": ENGINE.text(tokens), **fields}


def counts(findings: dict[str, Any]) -> dict[str, int]:
    totals = {name: row["count"] for name, row in findings.items() if isinstance(row, dict)
             and "count" in row}  # fmt: skip
    return {name: count for name, count in totals.items() if count}


@pytest.mark.parametrize(("temperature", "name"), [(0.0, "sim"), (0.8, "sim"), (0.0, "other")])
async def test_answer_oracle_matches_simulated_engine(
    tmp_path: Path, temperature: float, name: str
) -> None:
    model = ModelSettings(path="sim", name=name)
    settings = Settings(model=model, engines={"sim": {"end_every_tokens": 0}})
    task = json.loads(json.dumps(history_task(settings, tmp_path / "history.jsonl")))
    oracle = AnswerOracle(task["engine"]["block_size"], task["engine"]["vocabulary"])
    engine = await start_engine(
        "sim",
        {"end_every_tokens": 0, "decode_step_ms": 0.5, "prefill_base_ms": 0.1, "transfer": "none"},
        model=settings.model,
        roles=[Role.REPLICA],
        worker_id="alone",
        worker_epoch=1,
    )
    sampling = Sampling(max_tokens=70, temperature=temperature, seed=11)
    prompts = [list(range(5, 5 + length)) for length in (1, 15, 16, 17, 200)]
    try:
        engine_answers = await answers_alone(engine, [(p, sampling) for p in prompts], at_once=5)
    finally:
        await engine.close()
    sampling_fields = {"max_tokens": 70, "temperature": temperature, "seed": 11}
    for prompt, engine_answer in zip(prompts, engine_answers, strict=True):
        assert oracle.answer(pack_tokens(prompt), sampling_fields, name) == engine_answer.token_ids
        assert oracle.text(engine_answer.token_ids) == engine_answer.text


async def test_answer_oracle_knows_adapters() -> None:
    """Of a short prompt, of one that fills a block, and of a long one."""
    settings = Settings(model=ModelSettings(path="sim"), engines={"sim": {}})
    task = history_task(settings, Path("history.jsonl"))["engine"]
    oracle = AnswerOracle(task["block_size"], task["vocabulary"])
    engine = await start_sim(adapters={"ada": "x"}, end_every_tokens=0)
    prompts = [list(range(5, 5 + length)) for length in (1, 15, 16, 17, 200)]
    try:
        jobs = [job(prompt, adapter="ada", max_tokens=40) for prompt in prompts]
        answers = await collected(engine, *jobs)
    finally:
        await engine.close()
    sampling = {"max_tokens": 40, "temperature": 0.0, "seed": None}
    for prompt, engine_answer in zip(prompts, answers, strict=True):
        right = oracle.answer(pack_tokens(prompt), sampling, "ada")
        assert right == engine_answer.token_ids != oracle.answer(pack_tokens(prompt), sampling)


def test_record_decoder_reads_schema_files() -> None:
    decoder, codec = RecordDecoder(AVRO_DIR), Codec()
    fields = decoder.decode(codec.encode(example("trivium.Outcome")))
    assert fields["request_id"] == example("trivium.Outcome").request_id
    assert decoder.decode(codec.encode(example("trivium.Decision"))) is None
    assert decoder.decode(None) is None


def test_expected_answers_report_work_unlike_its_request() -> None:
    sent_tokens = pack_tokens(RIGHT[:2])
    good = [work(), work(2), work(3, PROMPT + sent_tokens, prior_tokens=2)]
    assert expected_of({"r1": request()}, good, ENGINE) == (EXPECTED, [])
    for bad in (
        work(2, PROMPT[4:]),
        work(3, PROMPT + sent_tokens[::-1], prior_tokens=2),
        {**work(), "request_id": "r9"},
        work(2, model="other"),
        work(2, adapter="ada"),
    ):
        _, odd = expected_of({"r1": request()}, [work(), bad], ENGINE)
        assert len(odd) >= 1, bad
    with_passages = request(retrieval={"k": 1})
    assert expected_of({"r1": with_passages}, [work(1, PROMPT + sent_tokens)], ENGINE)[1] == []


@pytest.mark.parametrize(
    ("outcomes", "wrong"),
    [
        ([outcome()], {}),
        ([outcome(), outcome()], {}),
        ([outcome(tokens=3), outcome(2)], {}),
        ([outcome(kind="cancelled", tokens=3)], {}),
        ([], {"without": 1}),
        ([outcome(), outcome(kind="cancelled")], {"double": 1}),
        ([outcome(kind="expired", tokens=2)], {"lost": 1}),
        ([outcome(tokens=3)], {"of_other_lengths": 1}),
        ([outcome(), {**outcome(kind="cancelled"), "request_id": "r9"}], {"of_no_request": 1}),
    ],
)
def test_check_outcomes_counts_deviations(
    outcomes: list[dict[str, Any]], wrong: dict[str, int]
) -> None:
    assert counts(check_outcomes({"r1": request()}, outcomes, EXPECTED)) == wrong


END = [{"request_id": "r1", "attempt": 1, "seq": 6}]


@pytest.mark.parametrize(
    ("frames", "wrong"),
    [
        ([frame(0, 4), frame(4, 9)], {}),
        ([frame(0, 4), frame(4, 6), frame(4, 6)], {}),
        ([frame(0, 4), frame(0, 6, 2), frame(6, 9, 2)], {}),
        ([frame(0, 4), frame(3, 9, 2)], {}),
        ([frame(0, 4), frame(5, 9)], {"gaps": 1}),
        ([frame(0, 4, token_ids=[9, 9, 9, 0])], {"wrong": 1}),
        ([frame(0, 4, texts=["?"])], {"wrong": 1}),
        ([frame(0, 6, ends=END), frame(6, 9)], {"beyond_the_end": 1}),
    ],
)
def test_check_frames_counts_deviations(
    frames: list[dict[str, Any]], wrong: dict[str, int]
) -> None:
    assert counts(check_frames(frames, EXPECTED, ENGINE)) == wrong


@pytest.mark.parametrize(
    ("client_answer", "wrong"),
    [
        (answer(RIGHT), {}),
        (answer(RIGHT[:4], "hung up"), {}),
        (answer([], "hung up", request_id=""), {}),
        (answer(RIGHT[:4]), {"gaps": 1}),
        (answer(RIGHT, text="?"), {"wrong": 1}),
        (answer(RIGHT[:4], "gave up"), {"not_answered": 1}),
        (answer(RIGHT, request_id="r9"), {"not_on_the_log": 1}),
    ],
)
def test_check_answers_counts_deviations(
    client_answer: dict[str, Any], wrong: dict[str, int]
) -> None:
    assert counts(check_answers([client_answer], EXPECTED, {"r1"}, ENGINE)) == wrong


def test_check_answers_reports_missing_outcome() -> None:
    findings = check_answers([answer(RIGHT)], EXPECTED, set(), ENGINE)
    assert counts(findings) == {"not_on_the_log": 1}


def test_difference_reports_gap_repeat_or_wrong_token() -> None:
    right = list(range(20))
    assert difference(right, right, is_whole=True) == ""
    assert difference([*right[:5], *right[9:]], right, is_whole=True) == "gaps"
    assert difference([*right[:9], *right[4:]], right, is_whole=True) == "repeats"
    assert difference([*right, 19], right, is_whole=True) == "repeats"
    assert difference([*right[:5], 99, *right[6:]], right, is_whole=True) == "wrong"
    assert difference(right[:5], right, is_whole=False) == ""


def test_stalls_attribute_pause_to_fault() -> None:
    blows = [
        {"name": "decode-1", "how": "kill", "at_ms": 10_000},
        {"name": "router-0", "how": "stop", "at_ms": 20_000},
        {"name": "decode-0", "how": "freeze", "at_ms": 25_000},
        {"name": "broker", "how": "kill", "at_ms": 60_000},
        {"name": "gateway-0", "how": "kill", "at_ms": 85_000},
        {"name": "broker", "at_ms": 80_000},  # is back
        {"name": "gateway-0", "how": "kill", "at_ms": 125_000},
    ]

    def paused(begin_ms: int, end_ms: int) -> dict[str, Any]:
        return {"asked_ms": begin_ms - 20, "at_ms": [begin_ms], "ended_ms": end_ms}

    client_answers = [
        paused(9_990, 13_000),  # the blow falls into it
        paused(12_000, 13_000),  # or before
        paused(19_000, 24_000),
        paused(21_000, 28_000),  # a router was hurt first, and may be waited for
        paused(33_000, 34_500),  # long after all
        paused(70_000, 72_000),  # the broker is away
        paused(90_000, 92_000),  # and all come back to it
        paused(99_000, 126_000),
        paused(40_000, 40_400),  # no stall
    ]
    rows_by_cause = stalls(client_answers, blows)
    assert {cause: row["stalls"] for cause, row in rows_by_cause.items()} == {
        "worker": 2, "router": 2, "nothing": 1, "broker": 2, "gateway": 1
    }  # fmt: skip
    assert (rows_by_cause["worker"]["p50_s"], rows_by_cause["worker"]["max_s"]) == (3.01, 3.01)


def test_checker_imports_no_product_module() -> None:
    text = Path(checker.__file__).read_text()
    modules = [
        name
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    ]  # fmt: skip
    tops = {module.partition(".")[0] for module in modules}
    assert not tops & {"schemas", "streams", "workers", "infra", "tests"}
