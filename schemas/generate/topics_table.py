"""Generates the rows of the topic table, and the table of `infra/docs/integrate.md`.

`make schemas` rewrites the part of the page between its two marks, and a test compares them.
"""

from pathlib import Path
from typing import Any

from schemas.settings import LogSettings
from schemas.topics import DEAD_LETTER_SUFFIX, TOPICS

PAGE = Path(__file__).parents[2] / "infra/docs/integrate.md"
COLUMNS = ("topic", "written by", "read by", "key", "records", "kept", "partitions, for")
_FROM, _TO = "<!-- topics -->\n", "<!-- end of topics -->\n"
Row = dict[str, Any]


def about_topics(log: LogSettings) -> list[Row]:
    """Return all data of the table about each topic, also for programs."""
    return [
        {
            "topic": log.topic_prefix + topic.name,
            "written_by": list(topic.written_by),
            "read_by": list(topic.read_by),
            "key": topic.key,
            "records": list(topic.records),
            "subjects": [log.topic_prefix + topic.subject(name) for name in topic.records],
            "cleanup": topic.cleanup,
            "retention_ms": topic.retention_ms if "delete" in topic.cleanup else None,
            "kept": topic.retention,
            "partitions": log.partitions(topic.group),
            "partition_by": topic.partition_by,
            "scales": topic.scales,
            "dead_letters": log.topic_prefix + topic.name + DEAD_LETTER_SUFFIX,
            "doc": topic.doc,
        }
        for topic in TOPICS.values()
    ]


def cells(row: Row) -> list[str]:
    """Return a row as texts, in the order of the columns."""
    scales = f"{row['partitions']}, {row['scales']}" if row["scales"] else "1, read whole"
    lists = {name: ", ".join(row[name]) for name in ("written_by", "read_by", "records")}
    return [
        *(row["topic"], lists["written_by"], lists["read_by"]),
        *(row["key"], lists["records"], row["kept"], scales),
    ]


def table_text() -> str:
    """Return the table of the page, with the defaults of the settings."""
    columns = (*COLUMNS, "what it is")
    rows = [[*cells(row), row["doc"]] for row in about_topics(LogSettings())]
    lines = [columns, ["---"] * len(columns), *([f"`{row[0]}`", *row[1:]] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page_with_table(page: str) -> str:
    """Return the page with the current table between its marks."""
    before, _, rest = page.partition(_FROM)
    _, _, after = rest.partition(_TO)
    return f"{before}{_FROM}\n{table_text()}\n{_TO}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
