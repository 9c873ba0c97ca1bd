"""Figures that the PPD paper publishes, as far as this project knows them; nothing is computed."""

# Turn-2 TTFT change from x=0 to x=1 in percent, by load level.
TABLE_1 = {
    "1P3D": {"low": -57.8, "medium": -65.2, "high": -73.3},
    "2P2D": {"low": -47.7, "medium": -51.6, "high": -56.2},
    "3P1D": {"low": -44.3, "medium": -38.1, "high": -24.9},
}
TABLE_1_POINTS = 15.0  # how far a cell may be off without an explanation

# Slow-down of decoding in percent, at a batch of 200, by prompts computed beside it.
FIGURE_2 = {"full x1": 48.0, "append x1": 2.0, "full x4": 57.0, "append x4": 21.0}
FIGURE_2_BATCH = 200

# Change from plain disaggregation to x=1 in percent: overall, and the range of matched runs.
TTFT_LATER = (-68.0, -73.0, -48.0)
KV_VOLUME = -75.0
TPOT_PREFILL_HEAVY = (7.0, 12.0)
# Plain 2P2D was degraded at so many of its load levels, while x=1 completed everything.
DEGRADED_2P2D = (9, 12)
