"""The routers' Faust app: whose group it is in, and who hears of its records and partitions."""

from streams.agents.app import TOPICS, make_app
from tests.streams.agents.fakes import LOG, router_with_partition


async def test_app_has_group_id_and_follows_partitions() -> None:
    partitions, _ = await router_with_partition()
    app = make_app(LOG, "router-a", partitions.process, partitions)
    assert (app.conf.id, app.conf.consumer_group_instance_id) == ("test.router", "router-a")
    assert set(app.agents) == {f"router.{topic}" for topic in TOPICS}
    await app.on_partitions_assigned.send([])
    assert partitions.group.rebalances == 1
