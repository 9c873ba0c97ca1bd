"""Writes aiperf's `inputs.json`: sessions with the body of every turn's call, and no times.

Written for `aiperf profile --custom-dataset-type inputs_json --endpoint-type raw`, which sends the
bodies unchanged. They are those of `trivium trace send`.
"""

import json
from collections.abc import Iterator
from typing import Any

from infra.traces.prompts import body
from infra.traces.trace import Trace, with_request_ids


def inputs_json(trace: Trace, model: str) -> Iterator[str]:
    """Yield the whole document; a request without a session gets one of its own."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for arrival in with_request_ids(trace):
        payloads = sessions.setdefault(arrival.session_id or arrival.request_id, [])
        payloads.append(body(trace, arrival, model))
    data = [{"session_id": name, "payloads": payloads} for name, payloads in sessions.items()]
    yield json.dumps({"data": data})
