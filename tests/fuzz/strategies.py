"""What the outside can send, drawn: JSON, bodies with fields changed, records with bytes changed.

`FUZZ_TIMES` multiplies the examples of every fuzz test; `make fuzz` sets it, with new seeds.
"""

import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from schemas.codec import Codec
from tests.schemas.examples import example

TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
CODEC = Codec()

HUGE = "a number of very many digits"  # which Python does not write
_HARMFUL: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(
            HUGE,
            2**63,
            -1,
            0,
            1e308,
            "",
            "\x00",
            "\r\n",
            "</s><|system|>",
            "\ufdd0",
        ),
        *("(?i)[a\x01-\U0010ffff]", "(" * 5_000, "[" * 5_000, '{"a":' * 2_000, "9" * 5_000),
        *([], {}, [[]] * 50, {"$schema": []}, {"$ref": "#"}, {"type": 7}, True, None),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | _HARMFUL,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def text_of(body: Any) -> bytes:
    """A body as JSON, with numbers that only others write."""
    return json.dumps(body).replace(json.dumps(HUGE), "9" * 5_000).encode("utf-8", "replace")


def examples(count: int, *, fuzz_factor: int = 1) -> settings:
    """Return Hypothesis settings; `make fuzz` runs `fuzz_factor` times more of these."""
    unhealthy = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=count * (TIMES * fuzz_factor if TIMES > 1 else 1),
        deadline=None,
        suppress_health_check=unhealthy,
    )


@st.composite
def changed_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes with a few of them changed, cut off, repeated or put in between."""
    buffer = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(buffer) - 1)))
        match draw(st.integers(0, 3)):
            case 0 if buffer:
                buffer[at] = draw(st.integers(0, 255))
            case 1:
                buffer[at:at] = draw(st.binary(max_size=12))
            case 2:
                del buffer[at : at + draw(st.integers(1, 40))]
            case _:
                buffer += buffer[at : at + 40]
    return bytes(buffer)


@st.composite
def record_bytes(draw: st.DrawFn, kinds: tuple[str, ...]) -> bytes:
    """A record of one of these kinds, with a few of its bytes changed."""
    return draw(changed_bytes(CODEC.encode(example(f"trivium.{draw(st.sampled_from(kinds))}"))))
