"""Section [broker]: the Kafka node that Trivium runs unless the cluster is external."""

from typing import Annotated

from pydantic import Field

from schemas.sections import Port, Texts, section


@section("broker")
class BrokerSettings:
    """How `trivium broker start` runs Kafka."""

    host: str = "127.0.0.1"
    port: Port = 9092  # 0: a free port, the same after restarts
    heap_mb: Annotated[int, Field(ge=128)] = 512
    quick: bool = False  # first compiler tier only: starts sooner, serves slower; for tests
    jvm_flags: Texts = ("-XX:+UseSerialGC",)
    java: str = ""  # 17 or newer; empty: the one that set-up installs
    libs: str = ""  # folder of the jars; empty: build/broker/libs of the checkout
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 20.0
