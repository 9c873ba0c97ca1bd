"""The files that ARCHITECTURE.md names for a chat's way are those that run, in that order."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat
from tests.streams.gateway.streamed_call import accepted_requests, streamed_call

ROOT = Path(__file__).parents[3]
# They run too, and hand nothing on: a gateway's state, what is asked on the way, and where the
# tokens will arrive. The page may leave them out.
BESIDE = {
    "state.py", "ids.py", "fair_share.py", "request/body.py", "request/sampling.py",
    "request/fields.py", "request/options.py", "request/search.py", "cache/query.py",
    "request/model/chat_marks.py", "http/encodings.py", "endpoints/wishes.py",
    "stream/hub.py", "stream/stream.py", "stream/delivered.py",
}  # fmt: skip
REPLACED = "log/backend.py"  # by the test's log


def files_named() -> list[str]:
    """Of the gateway, on the way to the log."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    way = text.partition("## The way of a request\n")[2].partition("| **route** |")[0]
    return re.findall(r"`streams/gateway/(\S+\.py)`", way)


async def files_run() -> list[str]:
    """In the order in which a streamed chat first calls something in them, until it is accepted."""
    gateway, folder, names = InProcessGateway(), f"{ROOT}/streams/gateway/", dict[str, None]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(folder) and not gateway.log.requests:
            names[name.removeprefix(folder)] = None

    sys.setprofile(note)
    try:
        async with streamed_call(gateway, chat(stream=True)):
            await accepted_requests(gateway)
    finally:
        sys.setprofile(None)
    return list(names)


async def test_architecture_page_lists_files_of_request_path_in_order() -> None:
    run, page_files = await files_run(), [name for name in files_named() if name != REPLACED]
    assert page_files == [name for name in run if name in page_files]
    assert set(run) - set(page_files) <= BESIDE
