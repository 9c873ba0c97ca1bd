"""The sections of the settings that every process shares.

`schemas/sections.py` fills and checks the sections; the other ones are beside the processes that
they configure.
"""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from schemas.errors import ConfigError
from schemas.sections import Natural, Positive, secret, section


def _is_address(text: str) -> bool:
    host, _, port = text.strip().rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65_536


@section("log")
class LogSettings:
    """Section [log]: the Kafka cluster, topic names and framing."""

    bootstrap: str = "127.0.0.1:9092"
    topic_prefix: str = ""
    session_partitions: Positive = 2  # most routers; each one makes all fetches of routers slower
    worker_partitions: Positive = 16  # most workers per topic
    gateway_partitions: Positive = 8  # most gateways
    retrieval_partitions: Positive = 4  # most replicas of a retrieval shard
    asker_partitions: Positive = 16  # most members that search: routers, gateways, workers
    document_partitions: Positive = 2
    prompt_partitions: Positive = 4  # most bridges of a topic of prompts
    replication_factor: Positive = 1
    min_insync_replicas: Natural = 0  # replicas of an acknowledged record; 0: the majority
    schema_registry: str = secret("")  # URL, perhaps with a password; empty: single-object encoding
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = ""
    sasl_username: str = ""
    sasl_password: str = secret("")
    tls_ca_file: str = ""
    request_timeout_ms: Positive = 5_000
    # node or rack of this process; its searches prefer replicas of the index in the same place
    place: str = ""

    def __post_init__(self) -> None:
        if self.min_insync_replicas > self.replication_factor:
            raise ConfigError(
                f"log.min_insync_replicas: expected at most replication_factor "
                f"{self.replication_factor}, found {self.min_insync_replicas}"
            )
        if not all(map(_is_address, self.bootstrap.split(","))):
            raise ConfigError(
                f"log.bootstrap: expected HOST:PORT, several with commas, found {self.bootstrap!r}"
            )

    @property
    def copies_min(self) -> int:
        """Return how many brokers have an acknowledged record: two of three, so one may fail."""
        return self.min_insync_replicas or self.replication_factor // 2 + 1

    def partitions(self, group: str) -> int:
        """Return the partition count of a topic group of the table."""
        return {
            "session": self.session_partitions,
            "worker": self.worker_partitions,
            "gateway": self.gateway_partitions,
            "retrieval": self.retrieval_partitions,
            "asker": self.asker_partitions,
            "document": self.document_partitions,
            "prompt": self.prompt_partitions,
            "single": 1,
        }[group]


ALIAS: Final = "@"  # between a model and the collection that its chats search
MODEL_NAME_CHARS_MAX: Final = 256  # of a model or adapter


@section("model")
class ModelSettings:
    """Section [model], or one of several [[models]]: a model, and the LoRA adapters over it."""

    path: str = ""  # a folder, a Hugging Face name, or one of workers/models; empty: the engine's
    revision: str = ""  # of a repository: the commit to download
    name: str = ""  # name in the API; empty: the folder's or repository's name
    max_model_len: Annotated[int, Field(ge=2)] = 2_048  # tokens of prompt and answer together
    # vLLM's parsers of tool calls and of reasoning; "auto": guessed from the chat template; "none"
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    # folders of LoRA adapters by the names that calls use as their model
    adapters: Mapping[str, str] = field(default_factory=dict)
    adapters_max: Positive = 4  # that an engine's batch may use at once; others wait

    @property
    def pinned(self) -> str:
        """Return the revision to download. Raise ConfigError if none is set."""
        if not self.revision:
            raise ConfigError(
                f"model.path: no folder {self.path!r} is here, and for a repository of that name "
                f"model.revision: expected the commit of {self.path!r} to download, found none"
            )
        return self.revision

    @property
    def served_name(self) -> str:
        return self.name or Path(self.path).name
