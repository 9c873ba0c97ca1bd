"""What the PPD paper and its authors publish, as far as this project knows it. Computes nothing.

"Not All Prefills Are Equal: PPD Disaggregation for Multi-turn LLM Serving", arXiv:2603.13358.
Code and raw results: github.com/freelulul/vllm-ppd.
"""

# Turn-2 TTFT change from x=0 to x=1 in percent, long contexts, by load level.
TABLE_1 = {
    "1P3D": {"low": -57.8, "medium": -65.2, "high": -73.3},
    "2P2D": {"low": -47.7, "medium": -51.6, "high": -56.2},
    "3P1D": {"low": -44.3, "medium": -38.1, "high": -24.9},
}
TABLE_1_POINTS = 15.0  # how far a cell may be off without an explanation
TABLE_1_CONTEXT = "large"

# Percent of the 180 points that each kind of configuration wins; hybrids have the rest.
TABLE_2 = {
    "TTFT": {"replica": 63.3, "x=0": 0.0, "0<x<1": 3.3, "x=1": 27.2},
    "TPOT": {"replica": 0.6, "x=0": 38.3, "0<x<1": 33.3, "x=1": 15.6},
    "throughput": {"replica": 0.0, "x=0": 4.4, "0<x<1": 27.8, "x=1": 38.3},
}
SUCCESS_MIN = 0.95  # of requests, for a configuration to win a point
UNLIKE_WINNERS = 92.2  # percent of points at which TTFT and TPOT have different winners

# Completion tokens/s in the authors' raw results for `large, long gen` at 20 conversations/s, all
# with 200 conversations (elsewhere configurations drew different numbers of them), and time per
# token of first turns with four replicas there: median, mean, 99th percentile.
THROUGHPUT_LONG_GEN_20 = {
    "1P3D x=2/3": 4295,
    "1P3D x=1": 4269,
    "1P3D x=1/3": 4212,
    "1P3D x=0": 4167,
    "2P2D x=1": 3910,
    "4R": 3642,
}
TPOT_REPLICAS_LONG_GEN_20 = (9.9, 11.5, 18.4)

# Slow-down of decoding in percent, at a batch of 200, by prompts computed beside it.
FIGURE_2 = {"full x1": 48.0, "append x1": 2.0, "full x4": 57.0, "append x4": 21.0}
FIGURE_2_BATCH = 200

# Change from plain disaggregation to x=1 in percent: overall, and the range of matched runs.
TTFT_LATER = (-68.0, -73.0, -48.0)
KV_VOLUME = -75.0
TPOT_PREFILL_HEAVY = (7.0, 12.0)
TTFT_ALL_LENGTHS = -70.0  # about so, for conversations of 2 to 16 turns

# Plain 2P2D was degraded (below 95 % success) at so many of its load levels, while x=1 completed
# everything; plain 3P1D was degraded too.
DEGRADED_2P2D = (9, 12)
# Turns that succeeded, in percent, in the authors' raw results for ShareGPT, by conversations/s.
SHAREGPT_PLAIN = {
    "1P3D": {12.0: 100.0},
    "2P2D": {2.0: 100.0, 4.0: 100.0, 8.0: 13.7, 12.0: 0.6},
    "3P1D": {2.0: 100.0, 4.0: 100.0, 8.0: 0.6},
}

# The same in their grid: plain 3P1D with the workload `large, long gen`.
GRID_3P1D_PLAIN = {8.0: 69.0, 20.0: 37.6}

# How the authors start vLLM: `--gpu-memory-utilization`, and `kv_buffer_size` of decode workers,
# where P2pNcclConnector keeps what it received, beside that memory, until the request ends.
GPU_MEMORY_SHARE = 0.85
RECEIVE_BUFFER_BYTES = 10e9
# Their first measurement of the connector (ppd/bandwidth_results.json): one request at a time, a
# cached prompt of 79 to 772 tokens, one token of answer, 59 ms whatever the length (mean of six).
# The model has 31 ms: two steps of 7.5 ms, 15 ms of hops and 1 ms of transfer. The rest is taken
# for the connector's, which pushes layer by layer, about 1 ms each, before the step ends.
CONNECTOR_MS = 28.0
