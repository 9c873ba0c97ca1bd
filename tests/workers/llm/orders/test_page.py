"""The page of orders, kept: what it promises is run on the engines that it names, and what it says
no engine does is what that engine says itself.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.records import Orchestration
from tests.workers.llm.engine_pair import EnginePair, Pair, VllmPair
from tests.workers.llm.engines import ENGINES
from tests.workers.llm.orders.features import FEATURES, Order

PAGE = Path(__file__).parents[4] / "infra" / "docs" / "orders.md"
ORDERS: list[Orchestration] = [order for order in Orchestration if order != "none"]
_ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)
_VLLM = [pytest.mark.vllm, pytest.mark.timeout(1_800)]
KINDS = [
    pytest.param("sim"),
    pytest.param("vllm, pull", marks=_VLLM),
    pytest.param("vllm, push", marks=[*_VLLM, pytest.mark.slow]),  # all orders: half a minute
]


def table() -> dict[tuple[str, str, str], str]:
    """What the page says, by engine, order and feature."""
    head, _, *rows = ([cell.strip() for cell in row.split(" | ")] for row in _ROW.findall(page()))
    columns = [column.rpartition(": ")[::2] for column in head[1:]]
    return {
        (engine, order.strip("`"), feature): cell
        for feature, *cells in rows
        for (engine, order), cell in zip(columns, cells, strict=True)
    }


def page() -> str:
    return PAGE.read_text().partition("## What each order does\n")[2].partition("\n## ")[0]


def test_page_lists_every_engine_order_and_feature() -> None:
    names = [str(kind.values[0]) for kind in KINDS]
    whole = {
        (name, order.value, feature) for name in names for order in ORDERS for feature in FEATURES
    }
    assert table().keys() == whole
    assert {*table().values()} <= {"yes", "no"}


@pytest.fixture(scope="module", params=KINDS)
def engines(
    request: pytest.FixtureRequest, pulling_pair: VllmPair, pushing_pair: VllmPair
) -> Iterator[tuple[str, EnginePair]]:
    """Two engines of a kind, by the page's name for it."""
    real = {"vllm, pull": pulling_pair, "vllm, push": pushing_pair}
    if request.param in real:
        yield request.param, real[request.param].get()
        return
    sim_pair = Pair.started(ENGINES["sim"])
    pair = (sim_pair.producer, sim_pair.consumer)
    peer_metadata = {
        engine.capability.engine_id: engine.capability.nixl_metadata for engine in pair
    }
    for engine in pair:
        engine.set_peer_metadata(peer_metadata.get)
    yield request.param, sim_pair
    sim_pair.close()


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("order", ORDERS)
def test_order_supports_features_that_page_promises(
    engines: tuple[str, EnginePair], order: Orchestration, feature: str
) -> None:
    """A feature of an order that works on one engine works on each that has the order."""
    name, pair = engines
    can = all(
        order in engine.capability.orchestrations for engine in (pair.producer, pair.consumer)
    )
    assert table()[name, order.value, feature] == ("yes" if can else "no")
    if not can:
        return
    place = ORDERS.index(order) * len(FEATURES) + [*FEATURES].index(feature)
    FEATURES[feature](Order(pair, order, 3_000 + 10 * place))
