"""The files that ARCHITECTURE.md names for a chat's way are all those that run, in that order."""

from tests.request_path import named_files, recorded_files
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat
from tests.streams.gateway.streamed_call import accepted_requests, streamed_call
from tests.tidy_pages import pages

ROOMS = ("streams/gateway", "streams/calls", "streams/openai")
REPLACED = "streams/calls/log/sender.py"  # by the test's log
# Called for the first time when a call is counted; the page names them on the way back.
WAITING = ["streams/calls/stream/hub.py", "streams/calls/stream/stream.py"]
FILES_MAX = 12  # on the way from the HTTP call to the write of its requests


async def test_page_names_all_gateway_files_in_call_order() -> None:
    gateway = InProcessGateway()
    with recorded_files(*ROOMS, until=lambda: gateway.log.requests) as files:
        async with streamed_call(gateway, chat(stream=True)):
            await accepted_requests(gateway)
    assert [*files, REPLACED] == [*named_files(*ROOMS)[:-1], *WAITING, REPLACED]
    assert named_files(*ROOMS)[-1] == REPLACED
    _, _, way_back = pages()["ARCHITECTURE.md"].partition("### The way back")
    assert all(f"`{name}`" in way_back for name in WAITING)
    assert len([*files, REPLACED]) <= FILES_MAX
