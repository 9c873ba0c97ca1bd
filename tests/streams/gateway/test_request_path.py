"""The files that ARCHITECTURE.md names for a chat's way are those that run, in that order."""

from tests.request_path import named_files, recorded_files
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat
from tests.streams.gateway.streamed_call import accepted_requests, streamed_call

# They run too, and hand nothing on: a gateway's state, what is asked on the way, and where the
# tokens will arrive. The page may leave them out.
BESIDE = {
    f"streams/{name}"
    for name in (
        "gateway/state.py", "gateway/endpoints/answer_cache.py", "gateway/http/encodings.py",
        "calls/fair_share.py", "calls/wishes.py", "calls/request/body.py",
        "calls/request/options.py", "calls/request/search.py", "calls/stream/hub.py",
        "calls/stream/stream.py", "openai/cache/query.py",
    )
}  # fmt: skip
ROOMS = ("streams/gateway", "streams/calls", "streams/openai")
REPLACED = "streams/gateway/log/backend.py"  # by the test's log


async def test_page_names_gateway_files_in_call_order() -> None:
    gateway = InProcessGateway()
    with recorded_files(*ROOMS, until=lambda: gateway.log.requests) as files:
        async with streamed_call(gateway, chat(stream=True)):
            await accepted_requests(gateway)
    page_files = [name for name in named_files(*ROOMS) if name != REPLACED]
    assert page_files == [name for name in files if name in page_files]
    assert files.keys() - set(page_files) <= BESIDE
