"""Every error that Trivium raises on purpose, as one tree.

TriviumError
├── ClientError            the caller's fault; a retry fails the same way
│   ├── InvalidRequest         400 invalid_request
│   ├── PromptTooLong          400 context_length_exceeded
│   ├── Unauthorized           401 invalid_api_key
│   ├── Forbidden              403 forbidden
│   ├── NotFound               404 not_found
│   ├── UnknownModel           404 model_not_found
│   ├── RequestTooSlow         408 request_timeout
│   ├── BodyTooLarge           413 body_too_large
│   ├── UnsupportedMedia       415 unsupported_media_type
│   ├── HeadersTooLarge        431 headers_too_large
│   ├── UnknownCollection      404 collection_not_found
│   ├── WrongDimension         400 wrong_dimension
│   ├── InvalidVector          400 invalid_vector
│   ├── UnknownFilterField     400 unknown_filter_field
│   ├── EmptyIndex             409 empty_index
│   └── Cancelled              499 cancelled
├── OverloadError          caused by load; try again later
│   ├── TooManyRequests        429 too_many_requests
│   ├── QueueFull              429 queue_full
│   └── DeadlineExceeded       504 deadline_exceeded
├── WorkerError            a worker or its engine failed; another placement may succeed
│   ├── WorkerLost             502 worker_lost
│   ├── WorkerRefused          503 worker_refused
│   ├── StaleEpoch             503 stale_epoch
│   ├── KvUnavailable          503 kv_unavailable
│   ├── EngineFailed           500 engine_failed
│   ├── EngineDead             503 engine_dead
│   ├── NoProgress             504 no_progress
│   ├── AttemptsDiffer         502 attempts_differ
│   ├── PriorRefused           502 prior_refused
│   └── InvalidAnswer          502 invalid_answer
└── SystemFault            ours, or our surroundings'
    ├── BrokerUnavailable      503 broker_unavailable
    ├── NotReady               503 not_ready
    ├── RecordError            500 undecodable_record
    │   └── RecordTooLarge         413 record_too_large
    ├── TopicError             500 topic_mismatch
    ├── LeaseError             500 no_lease
    │   ├── NameTaken              409 name_taken
    │   └── Fenced                 500 fenced
    ├── SnapshotError          500 bad_snapshot
    ├── RouterFailed           500 router_failed
    └── ConfigError            500 bad_config

`code` is stable and travels in records and HTTP bodies; `http_status` is what a gateway answers;
`retriable` says whether the same request may succeed when tried again.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from schemas.records import WireError

MESSAGE_CHARS_MAX = 2_048  # of an error in a record


class FaultSource(StrEnum):
    """The party at fault for an error."""

    CLIENT = "client"
    OVERLOAD = "overload"
    WORKER = "worker"
    US = "us"


def clip_message(message: str) -> str:
    """Return the message for a record: above the limit it is cut and ends in an ellipsis."""
    if len(message) <= MESSAGE_CHARS_MAX:
        return message
    return message[: MESSAGE_CHARS_MAX - 3] + "..."


class TriviumError(Exception):
    """Base of the tree; never raised itself."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retriable: ClassVar[bool] = False
    fault: ClassVar[FaultSource] = FaultSource.US

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def to_wire(self) -> "WireError":
        """Return the error for a record.

        Its message may quote a caller's input; what is not UTF-8 of that is escaped.
        """
        from schemas.records import WireError  # 100 classes that no command's help needs

        message = self.message.encode(errors="backslashreplace").decode()
        return WireError(code=self.code, message=clip_message(message), retriable=self.retriable)


class ClientError(TriviumError):
    """The caller's fault; `param` names the field at fault, if there is one."""

    code, http_status, fault = "client_error", 400, FaultSource.CLIENT

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(ClientError):
    """A field is missing, malformed or out of range."""

    code = "invalid_request"


class PromptTooLong(ClientError):
    """Prompt and answer do not fit the model's context or the gateway's limit."""

    code = "context_length_exceeded"


class Unauthorized(ClientError):
    """The API key is missing or unknown."""

    code, http_status = "invalid_api_key", 401


class Forbidden(ClientError):
    """The host name is not allowed, or the web page may not call the API."""

    code, http_status = "forbidden", 403


class NotFound(ClientError):
    """No such request or route exists."""

    code, http_status = "not_found", 404


class UnknownModel(ClientError):
    """No such model is served."""

    code, http_status = "model_not_found", 404

    def __init__(self, message: str) -> None:
        super().__init__(message, "model")


class RequestTooSlow(ClientError):
    """The request did not arrive in full within its time limit."""

    code, http_status = "request_timeout", 408


class BodyTooLarge(ClientError):
    """The HTTP body exceeds the limit."""

    code, http_status = "body_too_large", 413


class UnsupportedMedia(ClientError):
    """The content type of the body is not JSON."""

    code, http_status = "unsupported_media_type", 415


class HeadersTooLarge(ClientError):
    """The head of an HTTP request exceeds the limit."""

    code, http_status = "headers_too_large", 431


class UnknownCollection(ClientError):
    """No collection of that name exists here."""

    code, http_status = "collection_not_found", 404


class WrongDimension(ClientError):
    """A vector has another number of values than its collection."""

    code = "wrong_dimension"


class InvalidVector(ClientError):
    """A vector has NaN or infinity, or a value beyond the range of its storage."""

    code = "invalid_vector"


class UnknownFilterField(ClientError):
    """A filter names a field that no row has, or compares it with another kind of value."""

    code = "unknown_filter_field"


class EmptyIndex(ClientError):
    """The searched collection has no rows."""

    code, http_status = "empty_index", 409


class Cancelled(ClientError):
    """The request was cancelled by its client."""

    code, http_status = "cancelled", 499


class OverloadError(TriviumError):
    """The deployment has too much work at the moment."""

    code, http_status, fault, retriable = "overloaded", 429, FaultSource.OVERLOAD, True


class TooManyRequests(OverloadError):
    """The gateway's limit of requests in flight is reached."""

    code = "too_many_requests"


class QueueFull(OverloadError):
    """The router's admission queue is full."""

    code = "queue_full"


class DeadlineExceeded(OverloadError):
    """The request's deadline passed before it was answered."""

    code, http_status = "deadline_exceeded", 504


class WorkerError(TriviumError):
    """A worker or its engine failed."""

    code, http_status, fault, retriable = "worker_error", 502, FaultSource.WORKER, True


class WorkerLost(WorkerError):
    """A worker was lost while it had the request."""

    code = "worker_lost"


class WorkerRefused(WorkerError):
    """A worker was full or draining."""

    code, http_status = "worker_refused", 503


class StaleEpoch(WorkerError):
    """Work or KV belongs to an earlier epoch of a worker."""

    code, http_status = "stale_epoch", 503


class KvUnavailable(WorkerError):
    """KV has expired, is gone, or could not be fetched."""

    code, http_status = "kv_unavailable", 503


class EngineFailed(WorkerError):
    """The engine ended this request with an error."""

    code, http_status = "engine_failed", 500


class EngineDead(WorkerError):
    """The engine has ended; the worker must restart."""

    code, http_status = "engine_dead", 503


class NoProgress(WorkerError):
    """The engine produced no token within its first-token or progress deadline."""

    code, http_status = "no_progress", 504


class AttemptsDiffer(WorkerError):
    """A later attempt, or decode after prefill, generated other tokens than were delivered."""

    code = "attempts_differ"


class PriorRefused(WorkerError):
    """The form of an answer refuses the tokens that earlier attempts have generated."""

    code = "prior_refused"


class InvalidAnswer(WorkerError):
    """An answer does not have the requested form."""

    code = "invalid_answer"


class SystemFault(TriviumError):
    """A fault of Trivium itself, or of its environment."""

    code = "system_fault"


class BrokerUnavailable(SystemFault):
    """Kafka does not answer, or cannot be reached."""

    code, http_status, retriable = "broker_unavailable", 503, True


class NotReady(SystemFault):
    """No worker serves the model yet."""

    code, http_status, retriable = "not_ready", 503, True


class RecordError(SystemFault):
    """A record could not be encoded or decoded."""

    code = "undecodable_record"


class RecordTooLarge(RecordError):
    """A record, or one that follows from it, would exceed the log's limit."""

    code, http_status, fault = "record_too_large", 413, FaultSource.CLIENT


class TopicError(SystemFault):
    """A topic is missing or differs from the table in a way that cannot be changed in place."""

    code = "topic_mismatch"


class LeaseError(SystemFault):
    """No partition is free to lease, or a lease was lost."""

    code = "no_lease"


class NameTaken(LeaseError):
    """Another process has this member's name, so it must not join again."""

    code, http_status = "name_taken", 409


class Fenced(LeaseError):
    """Another process has taken over the transactional id of this one."""

    code = "fenced"


class SnapshotError(SystemFault):
    """A file is not a snapshot of an index, or is damaged."""

    code = "bad_snapshot"


class RouterFailed(SystemFault):
    """Several routers failed over this request, so that it was ended."""

    code = "router_failed"


class ConfigError(SystemFault):
    """A setting is unknown or cannot be parsed."""

    code = "bad_config"


def _tree(cls: type[TriviumError]) -> list[type[TriviumError]]:
    return [cls, *(error_class for sub in cls.__subclasses__() for error_class in _tree(sub))]


BY_CODE: dict[str, type[TriviumError]] = {cls.code: cls for cls in _tree(TriviumError)}


def from_wire(error: "WireError") -> TriviumError:
    """Return the exception for a record's error; an unknown code becomes a TriviumError."""
    return BY_CODE.get(error.code, TriviumError)(error.message)
