"""`trivium plan pools` as people and scripts call it."""

import json
from pathlib import Path

import pytest

from tests.infra.cli.trivium_runner import trivium_here

GIVEN = ("--rps", "60", "--prompt", "1000", "--answer", "256")


def planned(*arguments: str) -> dict[str, dict[str, float]]:
    """The pools by name."""
    code, output, errors = trivium_here("plan", "pools", *arguments, "--json")
    assert code == 0, errors
    return {pool["name"]: pool for pool in json.loads(output)["pools"]}


def test_plan_pools_prints_workers_and_reasons() -> None:
    code, output, _ = trivium_here("plan", "pools", *GIVEN)
    assert code == 0
    for words in ("prefill", "decode", "retrieval", "GPUs' time of prompts", "answers under way"):
        assert words in output


def test_plan_pools_adds_workers_for_traffic_and_tighter_target() -> None:
    base, twice = planned(*GIVEN), planned("--rps", "120", "--prompt", "1000", "--answer", "256")
    assert twice["prefill"]["workers"] > base["prefill"]["workers"]
    assert twice["decode"]["workers"] > base["decode"]["workers"]
    tight = planned(*GIVEN, "--tpot", "10")
    assert tight["decode"]["workers"] > base["decode"]["workers"]
    assert tight["prefill"] == base["prefill"]


def test_plan_pools_sizes_for_busiest_minute_of_trace(tmp_path: Path) -> None:
    """The trace has two minutes: 60 requests in the first, 120 in the second."""
    lines = [{"at": second, "count": 1 + second // 60} for second in range(121)]
    trace = tmp_path / "log.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps(
                {"timestamp": 1_000 * line["at"], "input_length": 900, "output_length": 100,
                 "hash_ids": []}
            )
            for line in lines
            for _ in range(line["count"])
        )
    )  # fmt: skip
    code, output, _ = trivium_here("plan", "pools", "--trace", str(trace), "--json")
    assert code == 0
    tree = json.loads(output)
    assert tree["log"]["busiest_per_s"] == tree["traffic"]["per_s"] == 2.0
    assert tree["traffic"]["prompt_tokens"] == 900
    assert planned("--trace", str(trace), "--rps", "50")["prefill"]["workers"] > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "plan pools: expected --rps, --prompt and --answer, or a traffic log with --trace"),
        (("--rps", "1"), "plan pools: expected --rps, --prompt and --answer"),
        (("--rps", "0", "--prompt", "1", "--answer", "1"), "traffic.per_s: expected more than 0"),
        ((*GIVEN, "--ttft", "50"), "no number of prefill workers gives a first token in 50 ms"),
        ((*GIVEN, "--tpot", "5"), "no number of decode workers gives a token in 5 ms: a lone"),
        ((*GIVEN, "--gpu", "l4", "--model", "qwen3-30b-a3b"), "no number of"),
        ((*GIVEN, "--gpu", "tpu"), "--gpu: expected one of h100"),
        ((*GIVEN, "--updates", "1e9"), "no number of copies keeps up with 1e+09 updates/s"),
    ],
)
def test_plan_pools_rejects_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    code, output, errors = trivium_here("plan", "pools", *arguments)
    assert (code, output) == (2, "")
    assert message in errors


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "expected a trace: Azure's CSV"),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,x\n", "expected a trace"),
        ("a.jsonl", "{", "a.jsonl:1: expected a trace"),
        (
            "b.jsonl",
            '{"timestamp": 0, "input_length": 9, "output_length": 1}',
            "expected at least two requests, found 1",
        ),
        ("away.csv", None, "no such file or directory"),
    ],
)
def test_plan_pools_rejects_bad_trace(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    code, _, errors = trivium_here("plan", "pools", "--trace", str(path))
    assert code == 2
    assert message in errors
    assert name in errors
