"""Published traces as scripts: which requests are one session's turns."""

import json
from collections.abc import Sequence
from pathlib import Path

from infra.simulator.traffic import traces
from infra.traces.formats import read
from infra.traces.trace import Arrival


def test_trace_script_groups_requests_into_sessions(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1_200, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 900, "input_length": 300, "output_length": 0, "hash_ids": [3]},
        {"timestamp": 2_000, "input_length": 1_700, "output_length": 9, "hash_ids": [0, 1, 4, 5]},
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    conversations = traces.script(read(file).arrivals, begin_ms=10.0, faster=2.0, block_tokens=64)
    assert [(c.session_id, c.turns_before, c.at_ms) for c in conversations] == [
        ("s0", 0, 10.0),
        ("s1", 0, 460.0),
        ("s0", 1, 1_010.0),
    ]
    assert conversations[2].hashes[:16] == conversations[0].hashes[:16]
    assert conversations[1].turns[0].output_tokens == 1  # an engine answers something
    assert conversations[2].hashes[16] != conversations[0].hashes[16]
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n"
    file = tmp_path / "azure.csv"
    file.write_text(rows + "2023-11-16 18:17:04.9799600,7,0\n")
    arrivals = read(file).arrivals
    assert [(a.at_ms, a.prompt_tokens, a.output_tokens) for a in arrivals] == [
        (0.0, 48, 10),
        (1_000.0, 7, 0),
    ]
    assert traces.window(arrivals, 2_000.0, 1) == arrivals


def test_trace_sessions_ignore_shared_first_block() -> None:
    """Only a prompt that extends another one as a whole continues its session."""
    prompts = (
        (600, [0, 90]),  # the opening and some words
        (1_200, [0, 1, 91]),
        (1_400, [0, 2, 92]),
        (700, [0, 93]),
        (1_900, [0, 1, 11, 94]),  # goes on with the second
        (2_200, [0, 2, 12, 13, 95]),  # with the third
        (2_600, [0, 1, 11, 14, 15, 96]),  # with the fifth
        (1_100, [0, 3, 97]),
    )
    arrivals = [_arrival(at, length, blocks) for at, (length, blocks) in enumerate(prompts)]
    expected = [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (1, 2), (7, 0)]
    assert traces.sessions(arrivals) == expected


def test_trace_sessions_keep_diverging_prompts_apart() -> None:
    """These prompts share a document, but none extends another one and its answer."""
    prompts = (
        (1_600, [5, 6, 7, 80]),
        (1_600, [5, 6, 8, 81]),
        (1_600, [5, 6, 9, 82]),
        (1_600, [5, 6, 9, 82]),
        (1_640, [5, 6, 9, 83]),
    )
    arrivals = [_arrival(at, length, blocks) for at, (length, blocks) in enumerate(prompts)]
    assert traces.sessions(arrivals) == [(number, 0) for number in range(5)]


def _arrival(at_s: int, prompt_tokens: int, blocks: Sequence[int]) -> Arrival:
    return Arrival(at_ms=1e3 * at_s, prompt_tokens=prompt_tokens, output_tokens=100, blocks=blocks)
