"""What `make test-changed` runs: tests over imports, near ones first, never over the fixtures."""

from tests.changed import changed_modules, reached_tests

GRAPH = {
    "shop/till": {"shop/stock/shelf"},
    "shop/stock/shelf": {"shop/stock/box"},
    "shop/stock/box": set[str](),
    "tests/conftest": {"shop/stock/box"},
    "tests/test_till": {"shop/till", "tests/conftest"},
    "tests/test_shelf": {"shop/stock/shelf"},
    "tests/test_door": {"tests/conftest"},
    "tests/e2e/test_shop": {"shop/till"},
}


def test_the_nearest_tests_come_first_and_fixtures_are_not_followed() -> None:
    assert reached_tests(GRAPH, {"shop/stock/box"}) == ["tests/test_shelf.py", "tests/test_till.py"]


def test_a_test_that_changed_is_run_and_one_that_is_gone_is_not() -> None:
    assert reached_tests(GRAPH, {"tests/test_door", "tests/test_gone"}) == ["tests/test_door.py"]
    assert reached_tests(GRAPH, {"tests/e2e/test_shop"}) == ["tests/e2e/test_shop.py"]


def test_a_change_of_the_fixtures_runs_who_imports_them() -> None:
    assert reached_tests(GRAPH, {"tests/conftest"}) == ["tests/test_door.py", "tests/test_till.py"]


def test_a_file_beside_modules_counts_as_these() -> None:
    paths = ["shop/stock/prices.json", "shop/till.py", "README.md"]
    assert changed_modules(paths, GRAPH) == {"shop/stock/shelf", "shop/stock/box", "shop/till"}
