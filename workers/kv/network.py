"""Limits the network devices that KV moves over, by environment variables of UCX, NIXL's backend.

By default UCX listens on every interface, and any process that reaches it can read and write KV. So
it is limited to loopback or to the devices of a private network (infra/docs/operate.md, "Keep the
network private"). Variables that are already set take precedence.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LOOPBACK, EVERY = "lo", "all"
_DEVICES = "UCX_NET_DEVICES"


def ucx_variables(devices: str) -> dict[str, str]:
    """Return the variables for a NIXL agent.

    `devices` are UCX's names, separated by commas; "all" sets no limit.
    """
    if devices == EVERY or _DEVICES in os.environ:
        return {}
    return {_DEVICES: devices}


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the time of a `with` block; a library reads them when it starts."""
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
