"""Recipes for stream platforms, as far as they can be checked without them: they parse, and the
fields, topics and groups that they name are real."""

import ast
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # ships no types

from schemas.codec import schema_of
from schemas.topics import TOPICS
from tests.page_blocks import Block, blocks

FLINK = Path(__file__).parents[3] / "infra" / "platform" / "flink"
KEYS = {"id"}  # columns of the record's key


def fields(*names: str) -> set[str]:
    return {field["name"] for name in names for field in schema_of(name)["fields"]}


def of_page(*languages: str) -> list[Block]:
    return [each for each in blocks(*languages) if each.page.endswith("platforms.md")]


def columns(sql: str, table: str) -> set[str]:
    found = re.search(rf"CREATE (?:TABLE|STREAM) `?{table}`? \((.*?)\)\s*WITH", sql, re.DOTALL)
    assert found, table
    names = re.findall(r"(?:^|,)\s*`?(\w+)`? [A-Z]", found[1], re.MULTILINE)
    assert names
    return set(names)


@pytest.mark.parametrize(
    ("file", "table", "record"),
    [
        ("tables.sql", "prompts", "Prompt"),
        ("tables.sql", "answers", "Answer"),
        ("usage.sql", "usage", "Usage"),
    ],
)
def test_tables_of_flink_have_columns_of_the_records(file: str, table: str, record: str) -> None:
    assert columns((FLINK / file).read_text(), table) - KEYS <= fields(record)


def test_streams_of_ksqldb_have_fields_of_the_records() -> None:
    (sql,) = [each.text for each in of_page("sql") if "CREATE STREAM" in each.text]
    assert columns(sql, "prompts") - KEYS <= fields("Prompt")
    assert columns(sql, "answers") - KEYS <= fields("Answer")
    assert set(re.findall(r"`(\w+)`", sql)) <= fields("Prompt", "Answer")  # others are capitals


def test_spark_reads_and_writes_fields_of_the_records() -> None:
    (text,) = [each.text for each in of_page("python") if "pyspark" in each.text]
    ast.parse(text)
    assert set(re.findall(r'alias\("(text|max_\w+)"\)', text)) <= fields("Prompt")
    (read,) = re.findall(r'fields = "(.*)"', text)
    assert {column.split()[0] for column in read.split(", ")} <= fields("Answer")


def test_redpanda_connect_writes_fields_of_a_prompt() -> None:
    (recipe,) = [yaml.safe_load(each.text) for each in of_page("yaml") if "input:" in each.text]
    assert recipe["output"]["redpanda"]["topic"] in TOPICS
    (mapping,) = [each["mapping"] for each in recipe["pipeline"]["processors"]]
    names = set(re.findall(r"root\.(\w+) =", mapping))
    assert names and names <= fields("Prompt")


def test_keda_asks_for_the_lag_of_the_bridges() -> None:
    (scaled,) = [yaml.safe_load(each.text) for each in of_page("yaml") if "keda" in each.text]
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["topic"] in TOPICS
    assert trigger["metadata"]["consumerGroup"] == "bridge"
