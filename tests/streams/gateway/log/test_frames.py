"""Frames that cannot be meant are no records."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.errors import RecordError
from streams.gateway.log.frames import decode_frame
from tests.streams.gateway.samples import frame


@pytest.mark.parametrize(
    "changes",
    [
        {"first_seqs": [-1]},
        {"first_chars": [-1]},
        {"texts": []},
        {"attempts": [1, 1]},
        {"token_counts": [3]},
        {"token_counts": [-2]},
    ],
)
def test_a_frame_whose_rows_do_not_fit_is_no_record(changes: dict[str, Any]) -> None:
    """Text would be cut from the end of what a client has (issue 10, 24)."""
    codec = Codec()
    good = frame("r1", ["a", "b"])
    for record, fits in ((good, True), (replace(good, **changes), False)):
        value = codec.encode(record)
        if fits:
            assert decode_frame(codec, value).request_ids == ("r1",)
        else:
            with pytest.raises(RecordError, match="TokenFrame"):
                decode_frame(codec, value)
