"""Answers as clients of the chaos run saw them."""

from infra.bench.faults.http_clients import WHOLE, Seen


def seen(text: str, *, ended: str = WHOLE, request_id: str = "r1", client: str = "plain") -> Seen:
    return Seen(client=client, ended=ended, request_id=request_id, text=text)
