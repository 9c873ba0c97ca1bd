"""What `trivium explain` takes."""

import pytest

from infra.cli.log.explain import duration_ms
from schemas.errors import ConfigError


def test_duration_parser_returns_milliseconds() -> None:
    assert [duration_ms(text) for text in ("90s", "30m", "2h", "1d")] == [
        90_000,
        1_800_000,
        7_200_000,
        86_400_000,
    ]
    for text in ("", "2", "0h", "-1h", "1w", "1.5h"):
        with pytest.raises(ConfigError, match="--since: expected a duration such as 90s"):
            duration_ms(text)
