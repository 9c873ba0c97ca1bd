"""Serving as the PPD authors do it: what plain runs are simulated with.

Figures are in `ppd_paper.py`.

From their scripts, their proxy and the connector's code in vLLM (P2pNcclConnector): conversations
are dealt by hash (`infra/simulator/hash_placer.py`), and nobody waits for a worker. A prefill
worker's step ends when its connector has pushed all layers (`wait_for_save`), so the connector's
time is the engine's, and a prefill worker has a rate, however short the prompts: in the authors'
results 400 prompts of 128 to 400 tokens through one take 43 to 49 ms each. What is received lies in
a buffer beside the engine's memory until the request ends. Clients send text.
"""

from dataclasses import replace

from infra.evaluate.paper import ppd_paper
from infra.simulator.machine.latency import Setup

# Of two ninths of their second turns the proxy hashes another beginning than of the first, because
# the second prompt's format is drawn anew and the key is sought behind "User:". Those begin as new
# conversations, on x=1 too, which takes two ninths from every gain of x=1. That is not modelled.


def setup_of(setup: Setup, connector_ms: float) -> Setup:
    """The same machines, connected as theirs.

    Two of its constants were chosen with published figures in view. Steps beside a batch keep 512
    tokens, because then a full prompt slows them about as figure 2 says; the authors leave
    `max_num_batched_tokens` to vLLM, whose default is 8 192 on an H100. And the connector's time is
    what the model lacks of the authors' first measurement. `studies/sensitivity.py` has table 1
    without either.
    """
    return replace(
        setup,
        answers_found=False,
        receive_buffer_bytes=ppd_paper.RECEIVE_BUFFER_BYTES,
        send_ms=connector_ms,
        prefill_credits=setup.running_max,
    )
