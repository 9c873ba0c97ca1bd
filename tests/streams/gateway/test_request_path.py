"""The files that ARCHITECTURE.md names for a chat's way are those that run, in that order."""

from tests.request_path import named_files, recorded_files
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat
from tests.streams.gateway.streamed_call import accepted_requests, streamed_call

# They run too, and hand nothing on: a gateway's state, what is asked on the way, and where the
# tokens will arrive. The page may leave them out.
BESIDE = {
    f"streams/gateway/{name}"
    for name in (
        "state.py", "ids.py", "fair_share.py", "request/body.py", "request/sampling.py",
        "request/fields.py", "request/options.py", "request/search.py", "cache/query.py",
        "request/model/chat_marks.py", "http/encodings.py", "endpoints/wishes.py",
        "stream/hub.py", "stream/stream.py", "stream/delivered.py",
    )
}  # fmt: skip
REPLACED = "streams/gateway/log/backend.py"  # by the test's log


async def test_page_names_gateway_files_in_call_order() -> None:
    gateway = InProcessGateway()
    with recorded_files("streams/gateway", until=lambda: gateway.log.requests) as files:
        async with streamed_call(gateway, chat(stream=True)):
            await accepted_requests(gateway)
    page_files = [name for name in named_files("streams/gateway") if name != REPLACED]
    assert page_files == [name for name in files if name in page_files]
    assert files.keys() - set(page_files) <= BESIDE
