"""What `trivium status` and `trivium tail` print, from records at hand."""

from dataclasses import asdict

from infra.cli.operate.status import members
from schemas.records import EmbedCapability, EmbedLoad, Faults
from tests.infra.watched_fleet import fleet, status_lines


def test_status_shows_roles_and_engine_capabilities() -> None:
    rows = members(fleet())
    both = next(row for row in rows if row["member_id"] == "both-0")
    assert both["roles"] == ["prefill", "decode"]
    assert (both["tensor_parallel"], both["orchestrations"]) == (2, ["prefill_first"])
    lines = status_lines(rows, 120)
    assert any(row.startswith("both-0 prefill, decode ready 4/4") for row in lines)
    assert "sim tiny 1 prefill_first, concurrent prefill-0, prefill-1" in lines
    assert "sim tiny 2 prefill_first both-0" in lines


def test_status_shows_clock_skew() -> None:
    rows = members(fleet())
    rows[0]["clock_ms"] = -240
    assert "Clocks agree within 240 ms; KV moves within 250 ms." in status_lines(rows, 120)
    rows[1]["clock_ms"] = 20
    text = " ".join(status_lines(rows, 120))
    assert f"Clocks differ by 260 ms ({rows[0]['member_id']} is behind" in text


def test_status_fits_80_columns() -> None:
    rows = members(fleet())
    for row in rows:
        row["roles"], row["load"] = ["retrieval"], {**row["load"], "kv_blocks_total": 8192}
    head, *_ = status_lines(rows, 80)
    assert head == "member roles state credits running waiting tokens/s KV blocks KV out/in"
    rows[0] |= {"state": "lost", "silent_ms": 4_200}
    assert "both-0 retrieval lost 4 s 4/4 0 0 0/8192" in status_lines(rows, 100)
    assert any(row.startswith("both-0 retrieval lost") for row in status_lines(rows, 80))


def test_status_shows_embedding_workers() -> None:
    rows = members(fleet())
    assert {row["embedder"] for row in rows} == {row["embedding"] for row in rows} == {None}
    load = EmbedLoad(waiting=3, queries_total=5, documents_total=8, unchanged_total=2)
    rows[0] |= {
        "embedder": asdict(EmbedCapability(embedder="hash@1", dim=256, tokens_max=9)),
        "embedding": {**asdict(load), "chunks_total": 21, "ms_per_text": 1.25},
    }
    lines = status_lines(rows, 120)
    assert "embedding embedder waiting queries documents unchanged passages ms/text" in lines
    assert f"{rows[0]['member_id']} hash@1, 256 values 3 5 8 2 21 1.2" in lines


def test_status_shows_member_faults() -> None:
    watched = fleet()
    watched.view.members["both-0"].faults = Faults(
        failing="prompts[1]: cannot be read: TopicAuthorizationFailedError",
        unreadable_total=2,
        unreadable="prompts[0]@7: offsets 5 to 7 cannot be read: \x1b[zstd",
    )
    rows = members(watched)
    assert [row["state"] for row in rows] == ["failing", "ready", "ready"]
    lines = status_lines(rows, 200)
    assert any(row.startswith("both-0 prefill, decode failing") for row in lines)
    fails = "both-0 fails: prompts[1]: cannot be read: TopicAuthorizationFailedError"
    passed = "both-0 passed over 2 that it could not read; the last: prompts[0]@7: offsets 5 to 7"
    assert fails in lines
    assert f"{passed} cannot be read: \\x1b[zstd; see `trivium dlq list`" in lines


def test_status_reports_empty_fleet() -> None:
    assert status_lines([], 120)[0].startswith("no member is alive")
