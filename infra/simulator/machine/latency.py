"""How long a simulated engine takes: a roofline of GPU, model and link, from first principles.

Theory of operation. A step of an engine runs every layer's matrix products once over all of its
tokens (one per decoding sequence and a chunk of prompts), and attention per sequence. The products
take the longer of reading the weights and computing on the tokens (the roofline; Williams,
Waterman, Patterson, CACM 2009); decode attention reads each sequence's KV; prompt attention
computes on pairs of tokens. These run one after the other on the same GPU, so the step is their
sum and a fixed overhead. Interference follows: a chunk next to a running batch costs nothing as
long as the products still wait for the weights, and 2 FLOP per parameter and token from there on.

Constants are those of data sheets and of engines' defaults, but for `mixed_chunk_tokens`, which was
chosen with a published figure in view. Nothing is shared with the router's estimator.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Figures of a data sheet, and the shares of them that real kernels reach."""

    name: str
    flops: float  # dense bf16 FLOP/s
    hbm_bytes_per_s: float
    memory_bytes: float
    flops_share: float = 0.6  # large bf16 matrix products of serving engines: 0.5 to 0.7
    hbm_share: float = 0.8  # of streaming reads
    memory_share: float = 0.9  # of memory that an engine takes; vLLM's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shape of a dense decoder with grouped-query attention."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int = 2
    active_parameters: float = 0.0  # per token; 0: all, as in a dense model

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_value

    @property
    def computed_parameters(self) -> float:
        return self.active_parameters or self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of keys and values of all layers: 131 072 for Llama 3.1 8B."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link that KV moves over; one per worker and direction."""

    bytes_per_s: float
    share: float = 0.8
    latency_ms: float = 1.0  # request, post and completion; measured with NIXL: 0.5 to 2 ms


# NVIDIA H100 SXM data sheet (dense figures, without sparsity).
H100 = GpuSpec(name="H100 SXM", flops=989.5e12, hbm_bytes_per_s=3.35e12, memory_bytes=80e9)
# The model card of Llama 3.1 8B.
LLAMA_8B = Model(
    name="Llama 3.1 8B", parameters=8.03e9, layers=32, hidden=4096, kv_heads=8, head_dim=128
)
# The model cards of Qwen2.5-14B and of Qwen3-30B-A3B (128 experts, 8 of them for a token).
QWEN_14B = Model(
    name="Qwen2.5-14B", parameters=14.7e9, layers=48, hidden=5120, kv_heads=8, head_dim=128
)
QWEN_30B = Model(
    name="Qwen3-30B-A3B",
    parameters=30.5e9,
    active_parameters=3.3e9,
    layers=48,
    hidden=2048,
    kv_heads=4,
    head_dim=128,
)
NIC_400G = Link(bytes_per_s=50e9)  # 400 Gbit/s per GPU, as in an HGX node


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A machine type: GPU, model, link and the settings of its engines."""

    gpu: GpuSpec = H100
    model: Model = LLAMA_8B
    link: Link = NIC_400G
    overhead_ms: float = 1.5  # scheduling, sampling and launches of one step
    # Communication between the GPUs of one worker, per token of a step: collectives of tensor
    # parallelism, or tokens sent to experts. 0: a worker is one GPU.
    exchange_ms_per_token: float = 0.0
    prefill_chunk_tokens: int = 8_192  # most tokens of a step on a prefill worker
    # Most tokens of a step beside a running batch, batch included: vLLM's first default for chunked
    # prefill, and the order of what Sarathi-Serve (OSDI 2024) recommends for tight TPOT. Chosen
    # over 8 192, vLLM's later default on such a GPU, as figure 2 of the PPD paper comes out better.
    mixed_chunk_tokens: int = 512
    running_max: int = 256  # sequences in a batch; vLLM's default
    prefill_credits: int = 16  # active prompts of a prefill worker
    decode_credits: int = 0  # active answers of any other worker; 0: `running_max`
    prefill_running_max: int = 0  # of these, in the engine at once; 0: as many as fit into a step
    block_tokens: int = 64  # granularity of prefix caches
    bus_ms: float = 3.0  # one hop over the log, produce to consume
    ack_ms: float = 0.0  # until a write is acknowledged; 0: counted in the hop
    steps_max: int = 0  # steps between outputs to the worker; 0: only the first and last tokens
    receiver_keeps: bool = True  # KV that the receiver has cached is not sent again
    # Whether an answer's KV serves the next turn: not if clients send the answer's text back and
    # its tokens differ from those that were sampled.
    answers_found: bool = True
    # Delay of a prefill worker's step by a connector that pushes KV, in ms per prompt. 0: none,
    # as with NIXL, where the receiver reads.
    send_ms: float = 0.0
    # A connector's receive buffer outside the engine's memory. It keeps KV until the request ends;
    # a worker whose buffer overflows dies. None: KV goes straight into the engine's blocks, as with
    # NIXL.
    receive_buffer_bytes: float | None = None

    @property
    def kv_blocks(self) -> int:
        """Return the blocks of KV that fit beside the weights."""
        room = self.gpu.memory_bytes * self.gpu.memory_share - self.model.weight_bytes
        return int(room / (self.model.kv_bytes_per_token * self.block_tokens))

    def transfer_ms(self, kv_bytes: float) -> float:
        """Return the time of one transfer that has the link to itself."""
        return self.link.latency_ms + 1e3 * kv_bytes / (self.link.bytes_per_s * self.link.share)


class StepCosts:
    """The constants of the model above, multiplied out; all in ms."""

    __slots__ = ("exchange_ms", "kv_ms", "overhead_ms", "pair_ms", "token_ms", "weights_ms")

    def __init__(self, setup: Setup) -> None:
        gpu, model = setup.gpu, setup.model
        per_byte_ms = 1e3 / (gpu.hbm_bytes_per_s * gpu.hbm_share)
        per_flop_ms = 1e3 / (gpu.flops * gpu.flops_share)
        self.weights_ms = model.weight_bytes * per_byte_ms
        self.token_ms = 2 * model.computed_parameters * per_flop_ms
        self.kv_ms = model.kv_bytes_per_token * per_byte_ms  # per token of context and step
        self.pair_ms = 4 * model.layers * model.hidden * per_flop_ms  # QK and AV of one pair
        self.overhead_ms = setup.overhead_ms
        self.exchange_ms = setup.exchange_ms_per_token

    def fixed_ms(self, tokens: int) -> float:
        """Return the part of a step that depends on its number of tokens alone."""
        computing_ms = max(self.weights_ms, self.token_ms * tokens)
        return computing_ms + self.exchange_ms * tokens + self.overhead_ms

    def step_ms(
        self, *, decoding: int, context_tokens: int, chunk_tokens: int = 0, pairs: float = 0.0
    ) -> float:
        """Return the time in ms of a step: decoding sequences, and a chunk of prompts.

        The `decoding` sequences have `context_tokens` in all. `pairs` is the number of (token,
        earlier token) pairs of the chunk's causal attention.
        """
        attention_ms = self.kv_ms * context_tokens + self.pair_ms * pairs
        return self.fixed_ms(decoding + chunk_tokens) + attention_ms
