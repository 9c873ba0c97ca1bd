"""Section [broker]: the Kafka node that Trivium runs itself, unless the cluster is external."""

from dataclasses import dataclass

from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """How `trivium broker start` runs Kafka."""

    host: str = "127.0.0.1"
    port: int = 9092  # 0: a free one, kept over restarts
    heap_mb: int = 512
    quick: bool = False  # first compiler tier only: starts sooner, serves slower; for tests
    jvm_flags: tuple[str, ...] = ("-XX:+UseSerialGC",)
    java: str = "java"
    libs: str = ""  # folder of the jars; empty: build/broker/libs of the checkout
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65_536:
            raise ConfigError(f"broker.port: expected 0 to 65535, found {self.port}")
        if self.heap_mb < 128:
            raise ConfigError(f"broker.heap_mb: expected at least 128, found {self.heap_mb}")
