"""On which network devices KV moves, as variables of the libraries below NIXL.

UCX listens on every interface that it finds, and whoever reaches it can read and write KV. So it is
told: loopback, or the devices of a private network (ARCHITECTURE.md, Private network). What the
environment says already has the last word.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LOOPBACK, EVERY = "lo", "all"
_DEVICES = "UCX_NET_DEVICES"


def ucx_variables(devices: str) -> dict[str, str]:
    """For whoever starts an agent: `devices` as UCX names them, with commas; "all": no limit."""
    if devices == EVERY or _DEVICES in os.environ:
        return {}
    return {_DEVICES: devices}


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """The environment with these, for what reads it once at its start."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
