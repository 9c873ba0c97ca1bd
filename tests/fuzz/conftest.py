"""Drawing takes a slow processor minutes; `make fuzz`, which draws more, has no limit at all."""

import pytest

LIMIT_S = 600


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.config.getoption("timeout") is None:
        item.add_marker(pytest.mark.timeout(LIMIT_S))
