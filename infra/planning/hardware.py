"""The figures from which placements of the search pool are computed, each with its source.

LLM workers are those of `infra/simulator/machine/latency.py`, on one GPU or on several. A search
advances by extends: each reads vectors and edges of rows at random. No figure was fitted to a
comparison of placements.
"""

import math
from dataclasses import dataclass, replace

from infra.simulator.machine.latency import (
    H100,
    LLAMA_8B,
    NIC_400G,
    QWEN_14B,
    QWEN_30B,
    GpuSpec,
    Link,
    Model,
    Setup,
)
from schemas.errors import ConfigError

NODE_GPUS = 8  # of an HGX H100 node, joined by NVLink
# NVIDIA H100 SXM data sheet: NVLink 900 GB/s, both directions together.
NVLINK = Link(bytes_per_s=450e9, latency_ms=0.0)
# DeepEP (deepseek-ai/DeepEP, its page on V1, normal kernels on H800): dispatch and combine reach
# 153 to 158 GB/s among 8 GPUs of a node and 43 GB/s among 16 of two.
EXPERTS_NVLINK, EXPERTS_NIC = 153e9, 43e9
# Latency of one exchange of few tokens: assumed. DeepEP's low-latency kernels take 41 and
# 81 us longer among 16 GPUs of two nodes than among 8 of one.
COLLECTIVE_MS, COLLECTIVE_NODES_MS = 0.01, 0.03
EXPERTS_PER_TOKEN = 8  # of Qwen3-30B-A3B
MODELS = {"llama-8b": LLAMA_8B, "qwen2.5-14b": QWEN_14B, "qwen3-30b-a3b": QWEN_30B}
# NVIDIA data sheets (dense bf16): A100 SXM 80 GB, H200 SXM, L4.
GPUS = {
    "h100": H100,
    "h200": replace(H100, name="H200 SXM", hbm_bytes_per_s=4.8e12, memory_bytes=141e9),
    "a100": replace(
        H100, name="A100 SXM 80 GB", flops=312e12, hbm_bytes_per_s=2.039e12, memory_bytes=80e9
    ),
    "l4": replace(H100, name="L4", flops=121e12, hbm_bytes_per_s=0.3e12, memory_bytes=24e9),
}


def gpu_named(name: str) -> GpuSpec:
    """Return one of `GPUS`; raises ConfigError for another name."""
    if name not in GPUS:
        raise ConfigError(f"--gpu: expected one of {', '.join(GPUS)}, found {name!r}")
    return GPUS[name]


def model_named(name: str) -> Model:
    """Return one of `MODELS`; raises ConfigError for another name."""
    if name not in MODELS:
        raise ConfigError(f"--model: expected one of {', '.join(MODELS)}, found {name!r}")
    return MODELS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """The size of an index, and the effort of its searches.

    `fresh` is the share of edges that lead to rows not seen before: 3 500 of 4 480 with 100 000
    vectors of 128 values (`top_m` 128, width 4), measured with the prototype of the engine.
    """

    rows: float = 10e6
    dim: int = 768
    value_bytes: int = 2  # float16
    degree: int = 32
    top_m: int = 128
    width: int = 4
    fresh: float = 0.78

    @property
    def total_bytes(self) -> float:
        """Return the bytes of all vectors and edges."""
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.dim * self.value_bytes + 4 * self.degree

    @property
    def extends(self) -> int:
        """Return the extends of one search, by the engine's estimate
        (`workers/vector/index/plans.py`)."""
        return self.top_m // self.width + 3

    @property
    def rows_per_extend(self) -> float:
        return self.width * self.degree * self.fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCosts:
    """The time of an extend of all active slots of a GPU.

    Rows are read at random: half of the bandwidth (`hbm_share`) is assumed, while streams reach
    0.8. The floor is one launch of a captured graph from Python and the query for its end, 10 to 20
    us (assumed, not measured). cuVS's own example (1 M rows of 128 values, degree 64, itopk 512)
    does 175 to 215 thousand searches/s in large batches; with its figures this model gives 85
    thousand, so it is rather too slow than too fast.
    """

    gpu: GpuSpec = H100
    index: IndexSpec = IndexSpec()
    hbm_share: float = 0.5
    floor_ms: float = 0.02

    def extend_ms(self, slots: int) -> float:
        """Return how long one extend of `slots` slots together takes."""
        read_bytes = slots * self.index.rows_per_extend * self.index.row_bytes
        return max(self.floor_ms, 1e3 * read_bytes / (self.gpu.hbm_bytes_per_s * self.hbm_share))

    @property
    def searches_per_s(self) -> float:
        """Return the searches per second that a full GPU answers."""
        many = 1 << 12
        return 1e3 * many / (self.extend_ms(many) * self.index.extends)

    @property
    def shards(self) -> int:
        """Return the number of GPUs that one copy of the index needs."""
        return math.ceil(self.index.total_bytes / (self.gpu.memory_bytes * self.gpu.memory_share))


def parallel(setup: Setup, degree: int, crossing: int = 0) -> Setup:
    """Return workers of `degree` GPUs with tensor parallelism.

    `crossing` of these GPUs are on another node. Each layer has two all-reduces, each of 2 (t - 1)
    / t times the tokens' hidden values over a ring. A ring that leaves the node is as slow as its
    slowest link.
    """
    if degree == 1:
        return setup
    model, values = setup.model, 2 * setup.model.layers * setup.model.hidden
    link = replace(NIC_400G, latency_ms=0.0) if crossing else NVLINK
    sent_bytes = 2 * (degree - 1) / degree * values * model.bytes_per_value
    each_ms = COLLECTIVE_NODES_MS if crossing else COLLECTIVE_MS
    return replace(
        _join_gpus(setup, degree),
        exchange_ms_per_token=1e3 * sent_bytes / (link.bytes_per_s * link.share),
        overhead_ms=setup.overhead_ms + 2 * model.layers * each_ms,
    )


def experts(setup: Setup, degree: int, displaced: float = 0.0) -> Setup:
    """Return workers of `degree` GPUs that share a model's experts.

    The share `displaced` of the experts is on another node. A token's hidden values go to its
    experts in one byte each and come back in two (DeepEP). Values for another node go through the
    network cards, which reduces the bandwidth for KV. Raises ConfigError for a share outside 0 to
    1.
    """
    if not 0 <= displaced <= 1:
        raise ConfigError(f"displaced experts: expected a share from 0 to 1, found {displaced:g}")
    model = setup.model
    token_bytes = 3 * EXPERTS_PER_TOKEN * model.hidden * model.layers / degree
    inside_ms = 1e3 * token_bytes * (1 - displaced) / EXPERTS_NVLINK
    outside_ms = 1e3 * token_bytes * displaced / EXPERTS_NIC
    joined = _join_gpus(setup, degree)
    layers_ms = COLLECTIVE_NODES_MS if displaced else COLLECTIVE_MS
    busy = outside_ms / (inside_ms + outside_ms + _token_ms(joined)) if displaced else 0.0
    return replace(
        joined,
        exchange_ms_per_token=inside_ms + outside_ms,
        overhead_ms=setup.overhead_ms + 2 * model.layers * layers_ms,
        link=replace(joined.link, bytes_per_s=joined.link.bytes_per_s * (1 - busy)),
    )


def _join_gpus(setup: Setup, degree: int) -> Setup:
    """Return the setup with `degree` GPUs joined into one."""
    gpu = replace(
        setup.gpu,
        flops=setup.gpu.flops * degree,
        hbm_bytes_per_s=setup.gpu.hbm_bytes_per_s * degree,
        memory_bytes=setup.gpu.memory_bytes * degree,
    )
    link = replace(setup.link, bytes_per_s=setup.link.bytes_per_s * degree)
    return replace(setup, gpu=gpu, link=link)


def _token_ms(setup: Setup) -> float:
    return 2e3 * setup.model.computed_parameters / (setup.gpu.flops * setup.gpu.flops_share)
