"""The rules about imports rest on this: what counts as an import, and what as a circle."""

import ast

from tests.import_graph import circles, entries_of, folders_of, longest_chain, modules_of

SOURCES = {
    "shop/till.py": "from shop.stock import shelf",
    "shop/stock/shelf.py": "def count():\n    import shop.stock.box",
    "shop/stock/box.py": "from shop.stock.shelf import count\nimport json",
    "shop/door.py": "if TYPE_CHECKING:\n    from shop.stock.box import Box",
}
GRAPH = modules_of((name, ast.parse(text)) for name, text in SOURCES.items())


def test_import_graph_counts_imports_anywhere_in_module() -> None:
    assert GRAPH == {
        "shop/till": {"shop/stock/shelf"},
        "shop/stock/shelf": {"shop/stock/box"},
        "shop/stock/box": {"shop/stock/shelf"},
        "shop/door": {"shop/stock/box"},
    }


def test_import_graph_finds_each_circle_once() -> None:
    assert circles(GRAPH) == [["shop/stock/box", "shop/stock/shelf"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"e"}}) == [
        ["a", "b", "c"],
        ["e"],
    ]


def test_import_graph_merges_modules_of_folder() -> None:
    assert folders_of(GRAPH) == ["", "shop", "shop/stock"]
    assert entries_of(GRAPH, "shop") == {"till": {"stock"}, "stock": set(), "door": {"stock"}}
    both = {"a/x": {"b/y"}, "b/z": {"a/w"}, "b/y": set[str](), "a/w": set[str]()}
    assert circles(both) == [], "of modules"
    assert circles(entries_of(both, "")) == [["a", "b"]]


def test_longest_chain_covers_all_levels_of_folder() -> None:
    graph = {
        "a/x": {"a/y", "b/z"},
        "a/y": {"a/w"},
        "a/w": {"b/z"},
        "b/z": {"b/v"},
        "b/v": set[str](),
    }
    assert longest_chain(graph, "a") == ["a/x", "a/y", "a/w"]
    assert longest_chain(graph, "b") == ["b/z", "b/v"]
    assert longest_chain(graph, "c") == []
    assert len(longest_chain(GRAPH, "shop/stock")) == 2, "a circle is gone round once"
