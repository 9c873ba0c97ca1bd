"""The PPD authors' serving, for simulations of plain runs.

From their scripts, their proxy and the connector's code in vLLM (P2pNcclConnector): conversations
are assigned by hash (`infra/simulator/hash_placer.py`), and no request waits for a free worker. A
prefill worker's step ends when its connector has pushed all layers (`wait_for_save`), so the
connector's time blocks the engine, and limits a prefill worker's rate even for short prompts: in
the authors' results 400 prompts of 128 to 400 tokens through one take 43 to 49 ms each. Received KV
stays in a buffer outside the engine's memory until the request ends. Clients send text.
"""

from dataclasses import replace

from infra.simulator.machine.latency import Setup

# How the authors start vLLM: `--gpu-memory-utilization`, and `kv_buffer_size` of decode workers,
# where P2pNcclConnector keeps received KV, outside that memory, until the request ends.
GPU_MEMORY_SHARE = 0.85
RECEIVE_BUFFER_BYTES = 10e9
# Their first measurement of the connector (ppd/bandwidth_results.json): one request at a time, a
# cached prompt of 79 to 772 tokens, one token of answer, 59 ms whatever the length (mean of six).
# The model has 31 ms: two steps of 7.5 ms, 15 ms of hops and 1 ms of transfer. The rest is assigned
# to the connector, which pushes layer by layer, about 1 ms each, before the step ends.
CONNECTOR_MS = 28.0

# Not modelled: for two ninths of the second turns the proxy hashes another prefix, because
# the second prompt gets a random format again and the key is searched after "User:". Those turns
# are assigned like new conversations, on x=1 too, which costs two ninths of every gain of x=1.


def setup_of(setup: Setup, connector_ms: float) -> Setup:
    """Return the setup with the authors' connector.

    Two of its constants were chosen to match published figures. Steps beside a batch have 512
    tokens, because then a full prompt slows them about as much as in figure 2; the authors leave
    `max_num_batched_tokens` to vLLM, whose default is 8 192 on an H100. The connector's time is the
    difference between the authors' first measurement and the model. `studies/sensitivity.py` has
    table 1 without either.
    """
    return replace(
        setup,
        answers_found=False,
        receive_buffer_bytes=RECEIVE_BUFFER_BYTES,
        send_ms=connector_ms,
        prefill_credits=setup.running_max,
    )
