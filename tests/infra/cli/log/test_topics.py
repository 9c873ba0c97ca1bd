"""`trivium topics`: what topics are for."""

import json

from schemas.generate.topics_table import about_topics
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from tests.infra.cli.trivium_runner import trivium_here


def test_topics_command_lists_topics_without_broker() -> None:
    env = {"TRIVIUM_LOG_BOOTSTRAP": "127.0.0.1:1"}
    code, output, errors = trivium_here("topics", env=env)
    assert (code, errors) == (0, "") and all(name in output for name in TOPICS)
    code, output, _ = trivium_here("topics", "list", "--json", env=env)
    assert code == 0 and json.loads(output) == about_topics(LogSettings())
    assert trivium_here("topics", "--json", env=env)[1] == output
