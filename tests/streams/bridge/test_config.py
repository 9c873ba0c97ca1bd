"""Section [bridge]: pairs from a file, from the environment, and what stops the start."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from infra.stack.configuration import dump, load
from schemas.errors import ConfigError
from streams.bridge.config import BridgeSettings, TopicPair, pairs_of

FILE = """
[bridge]
share = 0.5

[[bridge.pairs]]
prompts = "reviews"
answers = "reviews.rated"
template = "Rate this from 1 to 5: {text}"
temperature = 0
stop = ["\\n"]
retrieval = { collection = "products", filter = { year = { "$gt" = 2000 } } }
tool_choice = "auto"
[[bridge.pairs.tools]]
type = "function"
[bridge.pairs.tools.function]
name = "look"
parameters = { type = "object" }
[bridge.pairs.schema]
"$comment" = "one number"
type = "object"
required = ["stars"]
properties = { stars = { type = "integer" } }
"""
TOOLS = '[{"type": "function", "function": {"name": "look"}}]'


def loaded(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> BridgeSettings:
    file = tmp_path / "trivium.toml"
    file.write_text(text)
    return load(file, environ=environ or {}).bridge


def test_bridge_config_reads_pair_from_toml_table(tmp_path: Path) -> None:
    settings = loaded(tmp_path, FILE)
    (pair,) = settings.pairs
    assert (settings.share, pair.title, pair.temperature) == (0.5, "reviews", 0.0)
    assert pair.stop == ("\n",)
    assert pair.retrieval == {"collection": "products", "filter": {"year": {"$gt": 2000}}}
    assert json.loads(pair.schema)["required"] == ["stars"]
    assert json.loads(pair.tools)[0]["function"]["name"] == "look"


def test_bridge_config_survives_dump_and_load(tmp_path: Path) -> None:
    """A stack writes that file for its processes."""
    file = tmp_path / "trivium.toml"
    file.write_text(FILE)
    settings = load(file, environ={})
    file.write_text(dump(settings))
    assert load(file, environ={}) == settings


def test_bridge_config_reads_pairs_from_environment_as_json(tmp_path: Path) -> None:
    variable = "TRIVIUM_BRIDGE_PAIRS"
    environ = {variable: '[{"prompts": "a", "answers": "b"}]'}
    assert loaded(tmp_path, "", environ).pairs == (TopicPair(prompts="a", answers="b"),)
    with pytest.raises(ConfigError, match=f"{variable}: expected a list of tables as JSON"):
        loaded(tmp_path, "", {variable: "a,b"})
    with pytest.raises(ConfigError, match=r"bridge.pairs: expected a valid tuple, found 7"):
        loaded(tmp_path, "", {variable: "7"})


def test_topic_pair_reads_schema_and_tools_from_files(tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text('{"type": "array"}')
    (tmp_path / "tools.json").write_text(TOOLS)
    files = {"schema": "answer.json", "tools": "tools.json"}
    paths: dict[str, Any] = {name: str(tmp_path / file) for name, file in files.items()}
    pair = TopicPair(prompts="a", answers="b", **paths)
    assert json.loads(pair.schema) == {"type": "array"}
    assert pair.tools == TOOLS


def searching(filter: object) -> dict[str, Any]:
    """Return a pair's retrieval settings with this filter."""
    return {"retrieval": {"collection": "c", "filter": filter}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modle": "x"}, r"bridge.pairs.modle: unknown name, found 'x'"),
        ({"answers": None}, r"bridge.pairs.answers: expected a valid string"),
        ({"answers": "a"}, r"\(a\): topics: expected different ones"),
        ({"parts": "b"}, r"\(a\): topics: expected different ones"),
        ({"answers": "no spaces"}, r"bridge.pairs.answers: .*match pattern"),
        ({"deadline_ms": 90_000_000}, r"\(a\): deadline_ms: expected at most 82800000"),
        ({"metadata": ("id",)}, r"\(a\): metadata: expected a template"),
        ({"template": "{a b}", "name": "n"}, r"\(n\): template: expected the name of a field"),
        ({"format": "xml"}, r"format: expected one of prompt, json, json_envelope, avro"),
        ({"priority": "urgent"}, r"priority: expected one of"),
        ({"temperature": 3.0}, r"temperature: expected at most 2"),
        ({"retrieval": {"k": 2}}, r"\(a\): retrieval: collection: missing"),
        ({"retrieval": {"collection": "c", "j": 1}}, r"\(a\): retrieval: j: "),
        (searching({"year": {"$gt": "soon"}}), r"\(a\): retrieval: filter: expected .* found"),
        (searching({"year": {"$above": 1}}), r"\(a\): retrieval: filter: expected .*above"),
        (searching("year > 1"), r"\(a\): retrieval: filter: expected a JSON object"),
        (searching({"day": {"$gt": date(2026, 1, 1)}}), r"retrieval: filter: .* dates as texts"),
        ({"schema": "absent.json"}, r"schema: no readable file 'absent.json'"),
        ({"schema": '{"type": 3}'}, r"\(a\): schema: 3 is not valid"),
        ({"schema": "{"}, r"\(a\): schema: expected JSON"),
        ({"schema": '{"type": "object"}', "fallback": "x"}, r"\(a\): fallback: expected JSON"),
        ({"schema": '{"type": "object"}', "fallback": "[]"}, r"\(a\): fallback: \[\] is not of"),
        ({"schema": 3}, r"schema: expected a valid string"),
        ({"tools": "["}, r"\(a\): tools: expected JSON"),
        ({"tools": "[{}]"}, r"\(a\): tools.0.function: expected a function with a name"),
        ({"tools": "{}"}, r"\(a\): tools: expected a valid list"),
        ({"tools": "absent.json"}, r"tools: no readable file 'absent.json'"),
        ({"tools": TOOLS, "tool_choice": "{"}, r"\(a\): tool_choice: expected JSON"),
        ({"tools": TOOLS, "tool_choice": "other"}, r"\(a\): tool_choice: expected none, auto"),
        ({"tool_choice": "auto"}, r"\(a\): tool_choice: expected tools, too"),
    ],
)
def test_topic_pair_rejects_invalid_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TopicPair(**{"prompts": "a", "answers": "b", **fields})


def test_bridge_config_error_counts_tables(tmp_path: Path) -> None:
    table = '[[bridge.pairs]]\nprompts = "a"\nanswers = "b"\n'
    with pytest.raises(ConfigError, match=r"table 2: bridge.pairs.prompts: missing"):
        loaded(tmp_path, table + '[[bridge.pairs]]\nanswers = "b"')


def pairs(*topics: str) -> BridgeSettings:
    topic_pairs = (text.split(">") for text in topics)
    return BridgeSettings(pairs=tuple(TopicPair(prompts=a, answers=b) for a, b in topic_pairs))


def test_bridge_config_rejects_second_pair_of_prompt_topic() -> None:
    with pytest.raises(ConfigError, match="expected one pair of 'a', found several"):
        pairs("a>b", "c>b", "a>d")
    assert len(pairs("a>b", "c>b").pairs) == 2, "answers may lie on one topic"


def test_bridge_config_rejects_cycle_of_pairs() -> None:
    assert len(pairs("a>b", "b>c").pairs) == 2
    with pytest.raises(ConfigError, match="gets prompts from its own answers"):
        pairs("a>b", "b>c", "c>a")


def test_bridge_config_adds_two_default_pairs() -> None:
    default_pairs = pairs_of(BridgeSettings(), "dev.")
    assert [(pair.prompts, pair.answers) for pair in default_pairs] == [
        ("dev.prompts", "dev.answers"),
        ("dev.batch.prompts", "dev.batch.answers"),
    ]
    assert default_pairs[1].body and default_pairs[1].format == "avro"
    settings = BridgeSettings(
        pairs=(TopicPair(prompts="dev.prompts", answers="dev.answers", system="s"),)
    )
    assert [pair.system for pair in pairs_of(settings, "dev.")] == ["s", ""]


@pytest.mark.parametrize("topics", ["rows>requests", "documents>rows", "batch.prompts>rows"])
def test_bridge_config_rejects_system_topics(topics: str) -> None:
    with pytest.raises(ConfigError, match="is a topic of Trivium's own"):
        pairs_of(pairs(topics))
    assert pairs_of(pairs(topics), "dev.")
