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


def test_reached_tests_lists_nearest_first_without_fixture_imports() -> None:
    """Tests of whole stacks are left out."""
    test_paths = reached_tests(GRAPH, {"shop/stock/shelf"})
    assert test_paths == [
        f"tests/{name}.py" for name in ("shop/stock/test_orders", "test_shelf", "test_till")
    ]


def test_reached_tests_includes_changed_test_without_deleted() -> None:
    assert reached_tests(GRAPH, {"tests/test_door", "tests/test_gone"}) == ["tests/test_door.py"]


def test_reached_tests_of_conftest_are_importers_or_lie_below() -> None:
    assert reached_tests(GRAPH, {"tests/conftest"}) == ["tests/test_door.py", "tests/test_till.py"]
    below = reached_tests(GRAPH, {"tests/shop/stock/conftest"})
    assert below == ["tests/shop/stock/test_orders.py"]


def test_changed_modules_maps_data_file_to_nearest_folder() -> None:
    paths = ["shop/stock/prices/2026.json", "shop/till.py", "README.md"]
    assert changed_modules(paths, GRAPH) == {"shop/stock/shelf", "shop/stock/box", "shop/till"}
