"""A response in OpenAI's types, from its stored record and the answer on the log.

Pure. Status, output and usage follow from the stream alone, so all gateways report the same.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from schemas.errors import Cancelled, OverloadError, TriviumError
from schemas.records import Citation, DeltaKind, Endpoint, StoredResponse, TokenLogprob
from streams.calls.ids import MESSAGE_PREFIX, RESPONSE_PREFIX, SEARCH_PREFIX
from streams.calls.request.responses_body import RESULTS
from streams.calls.stream import answers
from streams.calls.stream.answers import call_error
from streams.calls.stream.citations import in_order
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.hub import Call, CallStream
from streams.openai.responses.output import OutputItem, ResponseOutput, output_of
from streams.openai.responses.tools import CUSTOM, called_tools

Json = dict[str, Any]
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"
_CUT = {"length": "max_output_tokens"}
_CUSTOM_PREFIX = "ctc_"  # of ids of items; so are those of an answer's other parts
_PREFIXES = {DeltaKind.REASONING: "rs_", DeltaKind.CONTENT: MESSAGE_PREFIX, DeltaKind.CALL: "fc_"}
PREFIXES = (SEARCH_PREFIX, _CUSTOM_PREFIX, *_PREFIXES.values())


class Form:
    """A response, and the parts of it that events carry, too."""

    def __init__(self, response_id: str, record: StoredResponse) -> None:
        self.response_id = response_id
        self.record = record
        self.searches = bool(record.query)
        self._options: Json = orjson.loads(record.options)
        # With the position of the record: a later call may refer to an item alone.
        self._name = response_id.removeprefix(RESPONSE_PREFIX)
        self.search_id = SEARCH_PREFIX + self._name
        tools = {tool.function_name: tool for tool in called_tools(self._options["tools"])}
        self._custom_names = {name for name, tool in tools.items() if tool.kind == CUSTOM}
        self._in_namespaces = {name: tool for name, tool in tools.items() if tool.namespace}

    @property
    def is_background(self) -> bool:
        """Return whether the response continues without its client, and can be cancelled."""
        return bool(self._options["background"])

    @property
    def conversation_id(self) -> str:
        """Return the conversation that the response is part of, empty without one."""
        conversation: dict[str, str] = self._options.get("conversation") or {"id": ""}
        return conversation["id"]

    def new_output(self) -> ResponseOutput:
        """Return the output of the answer before its first token."""
        return ResponseOutput(self._custom_names)

    def output_of(self, stream: CallStream) -> ResponseOutput:
        """Return the output of a stream of which nothing was drained."""
        return output_of(stream, self._custom_names)

    def key(self) -> StreamKey:
        """Return the key of its answer, with the position on the log."""
        record = self.record
        return StreamKey(
            parent_id=record.request_id,
            session_id=record.session_id,
            model=self._options["model"],
            endpoint=Endpoint.CHAT,
            partition=record.token_partition,
            offset=record.token_offset,
            created_s=record.created_ms // 1000,
            deadline_ms=record.deadline_ms,
            choices=1,
            tenant=record.tenant,
        )

    def initial_response(self) -> Json:
        """Return the response before its answer has begun."""
        return self._response("queued" if self.is_background else IN_PROGRESS, [])

    def running_response(self) -> Json:
        """Return the response while it is being answered."""
        return self._response(IN_PROGRESS, [])

    def whole(self, call: Call, output: ResponseOutput, error: TriviumError | None) -> Json:
        """Return the response with its answer so far."""
        (stream,) = call.streams
        status = _status(stream, error)
        extras: Json = {}
        if status == "failed" and error is not None:
            extras["error"] = _error(error)
        if stream.end is not None:
            extras["usage"] = _usage(stream)
            extras["trivium"] = answers.placement(call.key, [stream])
            if status == INCOMPLETE:
                reason = _CUT.get(stream.end.finish_reason)
                extras["incomplete_details"] = {"reason": reason}
        return self._response(status, self.items(stream, output, status), **extras)

    def items(self, stream: CallStream, output: ResponseOutput, status: str) -> list[Json]:
        """Return the output items of a response with this status; none if the answer has not
        begun."""
        if not stream.next_seq and status not in (COMPLETED, INCOMPLETE):
            return []
        last_status = status if status in (COMPLETED, IN_PROGRESS) else INCOMPLETE
        items = [self.search(stream)] if self.searches else []
        items += [self.item(item) for item in output.items[:-1]]
        return items + [self.item(item, stream, last_status) for item in output.items[-1:]]

    def item_id(self, item: OutputItem) -> str:
        """Return the id of an output item."""
        prefix = _CUSTOM_PREFIX if item.is_custom else _PREFIXES[item.kind]
        number = f"_{item.number}" if item.number else ""
        return f"{prefix}{self._name}{number}"

    def item(
        self, item: OutputItem, stream: CallStream | None = None, status: str = COMPLETED
    ) -> Json:
        """Build an output item; `stream` has the citations of the last one."""
        fields: Json = {"id": self.item_id(item), "status": status}
        if item.kind is DeltaKind.REASONING:
            return fields | {"type": "reasoning", "summary": [], "content": [self.part(item)]}
        if item.kind is DeltaKind.CONTENT:
            content = [self.part(item, stream)]
            return fields | {"type": "message", "role": "assistant", "content": content}
        fields |= {"call_id": item.call_id, **self.names(item)}
        if item.is_custom:
            return fields | {"type": "custom_tool_call", "input": item.text}
        return fields | {"type": "function_call", "arguments": item.text}

    def names(self, item: OutputItem) -> Json:
        """Return the name of the called tool, and its namespace if it has one."""
        tool = self._in_namespaces.get(item.name)
        if tool is None:
            return {"name": item.name}
        return {"name": tool.name, "namespace": tool.namespace}

    def part(self, item: OutputItem, stream: CallStream | None = None) -> Json:
        """Build the only part of a message or of reasoning."""
        if item.kind is DeltaKind.REASONING:
            return {"type": "reasoning_text", "text": item.text}
        return {
            "type": "output_text",
            "text": item.text,
            "annotations": [] if stream is None else annotations(stream, len(item.text)),
            "logprobs": logprobs(item.logprobs),
        }

    def search(self, stream: CallStream | None) -> Json:
        """Return the item of the search before the answer; without a stream, the search is in
        progress."""
        item: Json = {
            "id": self.search_id,
            "type": "file_search_call",
            "status": "searching" if stream is None else "completed",
            "queries": [self.record.query],
            "results": None,
        }
        if stream is None:
            return item | {"status": IN_PROGRESS}
        notice = stream.retrieved.get(0)  # results of probes are no part of this item
        if notice is not None and notice.error is not None:
            item["status"] = "failed"
        if RESULTS in self.record.include:
            item["results"] = [
                _result(citation) for citation in (notice.citations if notice else ())
            ]
        return item

    def _response(self, status: str, output: list[Json], **extras: Any) -> Json:
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.record.created_ms // 1000,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            **self._options,
            **extras,
        }


def _status(stream: CallStream, error: TriviumError | None) -> str:
    if error is not None:
        return "cancelled" if isinstance(error, Cancelled) else "failed"
    if stream.end is not None:
        return INCOMPLETE if stream.end.finish_reason in _CUT else COMPLETED
    has_begun = stream.next_seq or stream.start is not None or stream.retrieved
    return IN_PROGRESS if has_begun else "queued"


def _error(error: TriviumError) -> Json:
    code = "rate_limit_exceeded" if isinstance(error, OverloadError) else "server_error"
    return {"code": code, "message": f"{error.code}: {error.message}"}


def _usage(stream: CallStream) -> Json:
    counts = answers.usage([stream], 1)
    details = {"cache_write_tokens": 0, **counts["prompt_tokens_details"]}
    reasoning = counts.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": details,
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning["reasoning_tokens"]},
        "total_tokens": counts["total_tokens"],
    }


def annotations(stream: CallStream, chars: int) -> list[Json]:
    """Return the citations of an answer with `chars` characters; each document once, after the
    text."""
    documents: dict[str, Citation] = {}
    for notice in in_order(stream.retrieved):
        for citation in notice.citations:
            documents.setdefault(citation.document_id, citation)
    return [
        {
            "type": "file_citation",
            "file_id": document_id,
            "filename": _filename(citation),
            "index": chars,
        }
        for document_id, citation in documents.items()
    ]


def _filename(citation: Citation) -> str:
    return citation.title or citation.source or citation.document_id


def _result(citation: Citation) -> Json:
    return {
        "file_id": citation.document_id,
        "filename": _filename(citation),
        "score": round(max(0.0, citation.score), 4),
        "text": citation.text,
        "attributes": {"passage_id": citation.passage_id, "source": citation.source},
    }


def logprobs(tokens: Sequence[TokenLogprob]) -> list[Json]:
    """Format log-probabilities as in chats, which OpenAI's types share."""
    if not tokens:
        return []
    form = answers.chat_logprobs(tokens)
    content: list[Json] = form["content"]
    return content


def whole_of(form: Form, call: Call) -> bytes:
    """Return the body of a response that is not streamed."""
    (stream,) = call.streams
    return orjson.dumps(form.whole(call, form.output_of(stream), call_error(call)))
