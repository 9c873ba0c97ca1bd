"""A request's story on one screen, and as JSON."""

import json

import pytest

from infra.story.screen import as_json_value
from infra.terminal.output import print_json
from tests.infra.story.story_records import remote, render_story


def test_screen_shows_story_in_one_page() -> None:
    text = render_story(remote(w_ttft=1.0, w_tpot=0.0, tenant="abc", turn=1))
    lines = text.splitlines()
    assert lines[0] == "r1: completed in 100 ms, attempt 1"
    assert (
        "chat of tiny, class standard, tenant abc, session s-r1, turn 2, arrived 1970-01-01"
        in lines[1]
    )
    assert lines[2].endswith("deadline after 60,000 ms, its own weights: ttft 1, tpot 0")
    assert lines[3] == (
        "remote prefill_first: prefill-0 → decode-0, 2.0 MB of KV over NIXL; TTFT 27 ms, "
        "TPOT 18.00 ms, 5 tokens"
    )
    assert len(lines) < 40
    assert any("━●" in line and "prefill done" in line for line in lines)
    assert any("█" in line and "5 tokens in 3 frames" in line for line in lines)
    assert max(map(len, lines)) <= 160


def test_story_json_omits_prompt_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(as_json_value(remote()))
    story_json = json.loads(capsys.readouterr().out)
    assert story_json["request"]["prompt_tokens"] == 100
    assert story_json["work"][1]["kv"]["worker_id"] == "prefill-0"
    assert story_json["decisions"][0]["estimate"]["kv_price"] == 0.02
    assert len(story_json["decisions"][0]["candidates"]) == 8
    assert story_json["tokens"]["rows"] == [[27, "prefill-0", 1], [50, "decode-0", 2]] + [
        [99, "decode-0", 2]
    ]
    assert (story_json["tokens"]["ttft_ms"], story_json["tokens"]["tpot_ms"]) == (27, 18)
    assert story_json["outcome"]["kind"] == "completed"
    assert story_json["kv_bytes"] == 2_000_000
    assert story_json["steps"][0]["what"].startswith("accepted")
