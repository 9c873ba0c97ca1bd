"""What topics are for: in the page as in the table, and for programs."""

from schemas.generate.topics_table import PAGE, about_topics, page_with_table
from schemas.settings import LogSettings
from schemas.topics import TOPICS


def test_page_has_current_topics_table() -> None:
    page = PAGE.read_text()
    assert page == page_with_table(page), "run `make schemas`; commit it"
    assert all(f"| `{name}` |" in page for name in TOPICS)


def test_topic_rows_are_complete() -> None:
    rows = {row["topic"]: row for row in about_topics(LogSettings(topic_prefix="dev."))}
    assert list(rows) == [f"dev.{name}" for name in TOPICS]
    prompts, phases = rows["dev.prompts"], rows["dev.phases"]
    assert prompts["written_by"] == ["anyone"] and prompts["read_by"] == ["bridge"]
    assert prompts["subjects"] == ["dev.prompts-value"] and prompts["scales"] == "bridges"
    assert prompts["kept"] == "7 days" and prompts["dead_letters"] == "dev.prompts.dlq"
    subjects = [f"dev.phases-trivium.{name}" for name in ("Phase", "Retrieved", "Continued")]
    assert phases["subjects"] == subjects
    assert rows["dev.fleet"]["scales"] == "" and rows["dev.fleet"]["retention_ms"] is None
    for row in rows.values():
        assert row["written_by"] and row["read_by"] and row["key"] and row["doc"] and row["kept"]
        assert bool(row["scales"]) == (row["topic"] in _SHARED_OUT), row


_SHARED_OUT = {f"dev.{topic.name}" for topic in TOPICS.values() if topic.group != "single"}
