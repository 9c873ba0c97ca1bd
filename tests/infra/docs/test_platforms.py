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
    return [block for block in blocks(*languages) if block.page.endswith("platforms.md")]


def columns(sql: str, table: str) -> set[str]:
    table_match = re.search(
        rf"CREATE (?:TABLE|STREAM) `?{table}`? \((.*?)\)\s*WITH", sql, re.DOTALL
    )
    assert table_match, table
    names = re.findall(r"(?:^|,)\s*`?(\w+)`? [A-Z]", table_match[1], re.MULTILINE)
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
def test_flink_tables_use_record_fields(file: str, table: str, record: str) -> None:
    assert columns((FLINK / file).read_text(), table) - KEYS <= fields(record)


def test_ksqldb_streams_use_record_fields() -> None:
    (sql,) = [block.text for block in of_page("sql") if "CREATE STREAM" in block.text]
    assert columns(sql, "prompts") - KEYS <= fields("Prompt")
    assert columns(sql, "answers") - KEYS <= fields("Answer")
    assert set(re.findall(r"`(\w+)`", sql)) <= fields("Prompt", "Answer")  # others are capitals


def test_spark_recipe_uses_record_fields() -> None:
    (text,) = [block.text for block in of_page("python") if "pyspark" in block.text]
    ast.parse(text)
    assert set(re.findall(r'alias\("(text|max_\w+)"\)', text)) <= fields("Prompt")
    (read,) = re.findall(r'fields = "(.*)"', text)
    assert {column.split()[0] for column in read.split(", ")} <= fields("Answer")


def test_redpanda_connect_recipe_writes_prompt_fields() -> None:
    (recipe,) = [yaml.safe_load(block.text) for block in of_page("yaml") if "input:" in block.text]
    assert recipe["output"]["redpanda"]["topic"] in TOPICS
    (mapping,) = [processor["mapping"] for processor in recipe["pipeline"]["processors"]]
    names = set(re.findall(r"root\.(\w+) =", mapping))
    assert names and names <= fields("Prompt")


def test_keda_recipe_reads_bridge_lag() -> None:
    (scaled,) = [yaml.safe_load(block.text) for block in of_page("yaml") if "keda" in block.text]
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["topic"] in TOPICS
    assert trigger["metadata"]["consumerGroup"] == "bridge"
