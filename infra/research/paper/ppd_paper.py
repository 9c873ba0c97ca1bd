"""Figures that the PPD paper and its authors publish, as far as known. Computes nothing.

"Not All Prefills Are Equal: PPD Disaggregation for Multi-turn LLM Serving", arXiv:2603.13358. Code
and raw results: github.com/freelulul/vllm-ppd.
"""

# Turn-2 TTFT change from x=0 to x=1 in percent, of all workloads, by load level.
TABLE_1 = {
    "1P3D": {"low": -57.8, "medium": -65.2, "high": -73.3},
    "2P2D": {"low": -47.7, "medium": -51.6, "high": -56.2},
    "3P1D": {"low": -44.3, "medium": -38.1, "high": -24.9},
}
TABLE_1_POINTS = 15.0  # largest difference of a cell without an explanation
LONG_CONTEXT = "large"  # name prefix of workloads with long first turns

# Percent of the 180 points that each kind of configuration wins, and the mean of the three
# objectives, which the authors give without hybrids.
TABLE_2 = {
    "TTFT": {"replica": 63.3, "x=0": 0.0, "0<x<1": 3.3, "x=1": 27.2, "hybrid": 6.1},
    "TPOT": {"replica": 0.6, "x=0": 38.3, "0<x<1": 33.3, "x=1": 15.6, "hybrid": 12.2},
    "throughput": {"replica": 0.0, "x=0": 4.4, "0<x<1": 27.8, "x=1": 38.3, "hybrid": 16.1},
}
TABLE_2_AVERAGE = {"replica": 21.3, "x=0": 14.2, "0<x<1": 21.5, "x=1": 27.0}
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

# Percent that failed (table 4) by conversations/s. All are multiples of 1/18, so they are read as
# shares of the 18 workloads.
TABLE_4 = {
    "3P1D x=0": {8.0: 11, 12.0: 44, 16.0: 61, 20.0: 89},
    "3P1D x=1": {8.0: 6, 12.0: 22, 16.0: 44, 20.0: 67},
    "2P2D x=0": {8.0: 0, 12.0: 6, 16.0: 11, 20.0: 22},
    "2P2D x=1": {8.0: 0, 12.0: 0, 16.0: 6, 20.0: 11},
    "4R": {8.0: 0, 12.0: 0, 16.0: 0, 20.0: 0},
}

# Slow-down of decoding in percent, at a batch of 200, by one prompt computed beside it (figure 2)
# or by four (figure 6): whole prompts, and prompts appended to a history, of which the authors
# say that both process as many tokens. Their script takes the mean time per token of a batch of
# answers of 64 tokens, all behind one shared context of 2 048, which begins with the prompts.
FIGURE_2 = {"full": 48.0, "append": 2.0}
FIGURE_6 = {"full": 57.0, "append": 21.0}
FIGURE_2_BATCH, FIGURE_2_TOKENS = 200, 1_024
# The same by one prompt beside contexts of 2 048 to 65 536 tokens, in their script a batch of 64: a
# whole prompt makes steps 3 to 4 times as long at 32 768, an append less than 25 % at 65 536.
FIGURE_7_BATCH = 64
FIGURE_7_CONTEXTS = (2_048, 8_192, 16_384, 32_768, 65_536)
FIGURE_7_FULL = {32_768: (200.0, 300.0)}
FIGURE_7_APPEND_MAX = {65_536: 25.0}

# Figure 5: 500 prefill-heavy conversations with 1P3D at 8 and 16 conversations/s. Percent of later
# turns that are local by w_tpot (w_ttft is 1); what that changes from x=0 in percent.
FIGURE_5_LOCAL = {1.0: 95, 3.0: 50, 6.0: 20}
FIGURE_5_TTFT, FIGURE_5_TPOT = (-96.0, -94.0), (7.0, 12.0)

# Change from plain disaggregation to x=1 in percent: overall, and the range of matched runs.
TTFT_LATER = (-68.0, -73.0, -48.0)
KV_VOLUME, KV_TURNS = -75.0, 3.1  # at this number of turns on average
QUERY_LATENCY = (-25.0, -15.0)  # mean of whole answers, PPD from x=0, 1P3D with ShareGPT
TPOT_PREFILL_HEAVY = (7.0, 12.0)
TTFT_ALL_LENGTHS = -70.0  # approximately, for conversations of 2 to 16 turns

# Plain x=0 was degraded (below 95 % success) at (degraded, all) load levels with ShareGPT and
# WildChat, where dynamic PPD completed everything.
DEGRADED_2P2D, DEGRADED_3P1D = (9, 12), (7, 9)
# Turns that succeeded, in percent, in the authors' raw results for ShareGPT, by conversations/s.
SHAREGPT_PLAIN = {
    "1P3D": {12.0: 100.0},
    "2P2D": {2.0: 100.0, 4.0: 100.0, 8.0: 13.7, 12.0: 0.6},
    "3P1D": {2.0: 100.0, 4.0: 100.0, 8.0: 0.6},
}

# The same in their grid: plain 3P1D with the workload `large, long gen`.
GRID_3P1D_PLAIN = {8.0: 69.0, 20.0: 37.6}
