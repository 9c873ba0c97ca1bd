"""aiperf's `inputs.json`: sessions with the body of every turn's call, and no times.

Written for `aiperf profile --custom-dataset-type inputs_json --endpoint-type raw`, which sends the
bodies as they stand. They are those of `trivium trace send`.
"""

import json
from collections.abc import Iterator
from typing import Any

from infra.traces.prompts import body
from infra.traces.trace import Trace, named


def inputs_json(trace: Trace, model: str) -> Iterator[str]:
    """The whole document; a request without a session is one of its own."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for each in named(trace):
        payloads = sessions.setdefault(each.session_id or each.request_id, [])
        payloads.append(body(trace, each, model))
    data = [{"session_id": name, "payloads": found} for name, found in sessions.items()]
    yield json.dumps({"data": data})
