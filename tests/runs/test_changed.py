"""What `make test-changed` runs: tests over imports, near ones first, never over the fixtures."""

from tests.runs.changed import changed_modules, reached_tests

GRAPH = {
    "shop/till": {"shop/stock/shelf"},
    "shop/stock/shelf": {"shop/stock/box"},
    "shop/stock/box": set[str](),
    "tests/conftest": {"shop/stock/box"},
    "tests/test_till": {"shop/till", "tests/conftest"},
    "tests/test_shelf": {"shop/stock/shelf"},
    "tests/test_door": {"tests/conftest"},
    "tests/e2e/test_shop": {"shop/till"},
    "tests/shop/stock/test_orders": set[str](),
    "tests/shop/stock/conftest": set[str](),
}


def test_the_nearest_tests_come_first_and_fixtures_are_not_followed() -> None:
    """And whole stacks are left out."""
    found = reached_tests(GRAPH, {"shop/stock/shelf"})
    assert found == [
        f"tests/{name}.py" for name in ("shop/stock/test_orders", "test_shelf", "test_till")
    ]


def test_a_test_that_changed_is_run_and_one_that_is_gone_is_not() -> None:
    assert reached_tests(GRAPH, {"tests/test_door", "tests/test_gone"}) == ["tests/test_door.py"]


def test_a_change_of_fixtures_runs_who_imports_them_or_lies_below() -> None:
    assert reached_tests(GRAPH, {"tests/conftest"}) == ["tests/test_door.py", "tests/test_till.py"]
    below = reached_tests(GRAPH, {"tests/shop/stock/conftest"})
    assert below == ["tests/shop/stock/test_orders.py"]


def test_a_file_that_is_no_module_counts_as_the_modules_of_the_nearest_folder() -> None:
    paths = ["shop/stock/prices/2026.json", "shop/till.py", "README.md"]
    assert changed_modules(paths, GRAPH) == {"shop/stock/shelf", "shop/stock/box", "shop/till"}
