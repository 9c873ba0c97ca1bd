"""Serving as the PPD authors do it: what plain runs are simulated with.

Figures are in `ppd_paper.py`.

From their scripts, their proxy and the connector's code in vLLM (P2pNcclConnector): conversations
are dealt by hash (`infra/simulator/dealing.py`), and nobody waits for a worker. A prefill worker's
step ends when its connector has pushed all layers (`wait_for_save`), so the connector's time is the
engine's, and a prefill worker has a rate, however short the prompts: in the authors' results 400
prompts of 128 to 400 tokens through one take 43 to 49 ms each. What is received lies in a buffer
beside the engine's memory until the request ends. Clients send text.
"""

from dataclasses import replace

from infra.evaluate.paper import ppd_paper
from infra.simulator.machine.latency import Setup

# Of two ninths of their second turns the proxy hashes another beginning than of the first, because
# the second prompt's format is drawn anew and the key is sought behind "User:". Those begin as new
# conversations, on x=1 too, which takes two ninths from every gain of x=1. That is not modelled.


def setup_of(setup: Setup) -> Setup:
    """The same machines, connected as theirs.

    Steps beside a batch keep 512 tokens of prompts. The authors leave `max_num_batched_tokens` to
    vLLM, whose default is 8 192 on an H100; but with that one full prompt slows the model's steps
    beside a batch of 200 by 323 % and four by 650 %, where the authors measure 48 and 57 % (figure
    2) and 512 tokens give 44 and 46 %.
    """
    return replace(
        setup,
        answers_found=False,
        receive_buffer_bytes=ppd_paper.RECEIVE_BUFFER_BYTES,
        send_ms=ppd_paper.CONNECTOR_MS,
        prefill_credits=setup.running_max,
    )
