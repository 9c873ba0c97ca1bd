"""What vLLM's workers can be asked for in tests besides: moves of KV that fail."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from workers.llm.vllm.connectors import KvRelease


class FaultyKv(KvRelease):
    """Instead of `KvRelease`."""

    def fail_moves(self, count: int) -> None:
        """The next so many moves that this engine begins fail."""
        wrapper = get_kv_transfer_group().connector_worker.nixl_wrapper
        transfer, failures_left = type(wrapper).transfer, [count]

        def failing(*args: Any, **kwargs: Any) -> Any:
            if failures_left[0] > 0:
                failures_left[0] -= 1
                raise ConnectionError("a test cut the connection")
            return transfer(wrapper, *args, **kwargs)

        wrapper.transfer = failing
