"""What a gateway tells routers, so that work for lost gateways ends and other work goes on."""

import asyncio

import pytest

from schemas.errors import BrokerUnavailable
from streams.gateway import state
from tests.streams.gateway.in_process import STARTED_MS, InProcessGateway
from tests.streams.gateway.samples import chat, ended, events_of, frame, text_of
from tests.streams.gateway.streamed_call import TEXTS, accepted_requests, streamed_call
from tests.waiting import until


@pytest.mark.parametrize("wish", ["cancel", "continue"])
async def test_a_request_names_its_process_and_whether_it_outlives_it(wish: str) -> None:
    """So that routers can tell a lost gateway's work (issue 10, 13)."""
    gateway = InProcessGateway()
    async with streamed_call(
        gateway, chat(stream=True, n=2), X_Trivium_On_Disconnect=wish
    ) as stream:
        for request in await accepted_requests(gateway, 2):
            assert (request.gateway_id, request.gateway_started_ms) == ("gateway-1", STARTED_MS)
            assert request.keeps_running == (wish == "continue")
        stream.hang_up()


async def test_whoever_resumes_tells_routers_where_it_reads_on() -> None:
    """Of each choice, until they were told, and only at another gateway (issue 10, 13)."""
    first, second = InProcessGateway(), InProcessGateway()
    second.log.frames, second.log.news = first.log.frames, first.log.news
    async with streamed_call(first, chat(stream=True, n=2), X_Session_Id="mine") as stream:
        requests = await accepted_requests(first, 2)
        await first.log.push(*(frame(request.request_id, TEXTS[:1]) for request in requests))
        await until(lambda: bool(stream.ids))
        path = f"/v1/requests/{requests[0].parent_id}/events"
        async with (
            streamed_call(first, path=path, Last_Event_ID=stream.ids[-1]) as own,
            streamed_call(second, path=path, Last_Event_ID=stream.ids[-1]) as other,
        ):
            await second.log.wait_sent(2)
            for request in requests:
                end = ended(request.request_id, TEXTS[:1])
                await first.log.push(frame(request.request_id, [], end=end))
            await until(lambda: own.over and other.over)
    assert not first.log.resumptions
    assert second.log.sent == second.log.resumptions
    told = [(each.request_id, each.session_id) for each in second.log.resumptions]
    assert told == [(request.request_id, "mine") for request in requests]
    where = {(each.gateway_id, each.gateway_started_ms) for each in second.log.resumptions}
    assert where == {("gateway-1", STARTED_MS)}


async def test_a_resume_is_told_again_until_the_log_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes of the log is written meanwhile (issue 10, 13)."""
    first, second = InProcessGateway(), InProcessGateway()
    second.log.frames, second.log.news = first.log.frames, first.log.news
    monkeypatch.setattr(state, "RETRY_S", 0.0)
    async with streamed_call(first, chat(stream=True)) as stream:
        (request,) = await accepted_requests(first)
        await first.log.push(frame(request.request_id, TEXTS[:1]))
        await until(lambda: bool(stream.ids))
        second.log.trouble = BrokerUnavailable("away")
        path = f"/v1/requests/{request.request_id}/events"
        async with streamed_call(second, path=path, Last_Event_ID=stream.ids[0]) as other:
            await first.log.push(frame(request.request_id, TEXTS[1:2], first_seq=1, first_char=2))
            await until(lambda: bool(other.writes))
            second.log.trouble = None
            await second.log.wait_sent(1)
            end = ended(request.request_id, TEXTS[:2])
            await first.log.push(frame(request.request_id, [], end=end))
            await until(lambda: other.over)
    assert text_of(events_of(other.text)) == TEXTS[1]
    assert [each.request_id for each in second.log.resumptions] == [request.request_id]


async def test_a_cancellation_says_whose_it_is() -> None:
    """Only the tenant's own request is given up by it (issue 10, 13)."""
    gateway = InProcessGateway(api_keys=("alice", "bob"))

    def headers(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {name}"}

    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        call = client.post("/v1/chat/completions", json=chat(), headers=headers("alice"))
        task = tasks.create_task(call)
        (request,) = await accepted_requests(gateway)
        path = f"/v1/requests/{request.request_id}"
        elsewhere = headers("bob") | {"X-Session-Id": request.session_id}
        assert (await client.delete(path, headers=elsewhere)).status_code == 202
        assert (await client.delete(path, headers=headers("alice"))).status_code == 200
        gateway.state.sweep(0.0, 2**62)
        await task
    bobs, *alices = gateway.log.cancellations
    assert bobs.tenant not in ("", request.tenant)
    assert {each.tenant for each in alices} == {request.tenant}
