"""Which network devices KV moves over: environment variables of the libraries below NIXL.

By default UCX listens on every interface, and whoever reaches it can read and write KV. So it is
limited to loopback or to the devices of a private network (infra/docs/operate.md, "Keep the
network private"). Variables that are set already win.
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
