"""Trinity's figure 1: utilisation of the GPU by each stage, against batch size.

Theory of operation. Below a saturation scale a batch waits for something that all its members share
(weights for decode, a launch for search), so utilisation rises with the batch; above it utilisation
is at a roof: compute for prefill, bandwidth for the other two. The paper names a saturation scale,
a sublinearity exponent and a slope before the plateau, and gives no formula. Ours is

    U(B) = roof * min(1, slope * (B / scale) ** exponent)

where exponent 1 and slope 1 are an ideal roofline. `fit_saturation` finds slope and exponent below
a known scale. Utilisation is of the GPU's arithmetic, so the three stages have one axis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infra.planning.hardware import SearchCosts
from infra.simulator.machine.latency import Setup, StepCosts

BATCHES = tuple(2**power for power in range(13))
NEAR = 0.9  # share of the roof at the scale of measured points


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """Parameters of one stage's saturation curve."""

    roof: float
    scale: float  # batch at which an ideal roofline bends
    exponent: float = 1.0
    slope: float = 1.0

    def at(self, batch: float) -> float:
        """Return the utilisation at a batch size, in the unit of the roof."""
        return self.roof * min(1.0, self.slope * math.pow(batch / self.scale, self.exponent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A stage: its points, and the curve fitted to them."""

    stage: str
    what: str  # members of a batch
    points: Sequence[tuple[float, float]]
    fit: Saturation


def fit_saturation(points: Sequence[tuple[float, float]], scale: float = 0.0) -> Saturation:
    """Fit slope and exponent by least squares in logarithms, to the points below the scale.

    Without a scale, it is the least batch that reaches `NEAR` of the best.
    """
    roof = max(value for _, value in points)
    scale = scale or min(batch for batch, value in points if value >= NEAR * roof)
    below = [
        (math.log(batch / scale), math.log(value / roof))
        for batch, value in points
        if batch < scale and value > 0
    ]
    if len(below) < 2:
        return Saturation(roof=roof, scale=scale)
    mean_x = sum(x for x, _ in below) / len(below)
    mean_y = sum(y for _, y in below) / len(below)
    spread = sum((x - mean_x) ** 2 for x, _ in below)
    exponent = sum((x - mean_x) * (y - mean_y) for x, y in below) / spread
    if exponent <= 0:  # utilisation does not rise: a batch of one saturates
        return Saturation(roof=roof, scale=points[0][0])
    slope = math.exp(mean_y - exponent * mean_x)
    return Saturation(roof=roof, scale=scale, exponent=exponent, slope=slope)


def curves(
    setup: Setup, search: SearchCosts, *, prompt_tokens: int = 64, context_tokens: int = 1_024
) -> list[Curve]:
    """Return the curves of prefill of short prompts, decode and search, by batch size."""
    costs = StepCosts(setup)
    weights, kv = costs.weights_ms, costs.kv_ms * context_tokens
    extend = search.extend_ms(1 << 16) / (1 << 16)  # time per slot, if many share the GPU
    return [
        _curve(
            "prefill",
            f"prompts of {prompt_tokens} tokens",
            [(b, _prefill(setup, costs, b, prompt_tokens)) for b in BATCHES],
            costs.weights_ms / costs.token_ms / prompt_tokens,
        ),
        _curve(
            "decode",
            f"answers with {context_tokens} tokens of context",
            [(b, _decode(setup, costs, b, context_tokens)) for b in BATCHES],
            weights / kv,
        ),
        _curve(
            "search",
            f"searches of {search.index.dim} values",
            [(b, _search(search, b)) for b in BATCHES],
            search.floor_ms / extend,
        ),
    ]


def _curve(stage: str, what: str, points: list[tuple[float, float]], scale: float) -> Curve:
    return Curve(stage=stage, what=what, points=points, fit=fit_saturation(points, max(1.0, scale)))


def _prefill(setup: Setup, costs: StepCosts, batch: int, prompt: int) -> float:
    model, tokens, pairs = setup.model, batch * prompt, batch * prompt * prompt / 2
    flops = 2 * model.computed_parameters * tokens + 4 * model.layers * model.hidden * pairs
    took_ms = costs.step_ms(decoding=0, context_tokens=0, chunk_tokens=tokens, pairs=pairs)
    return _share(flops, took_ms, setup.gpu.flops)


def _decode(setup: Setup, costs: StepCosts, batch: int, context: int) -> float:
    model = setup.model
    answer_flops = 2 * model.computed_parameters + 4 * model.layers * model.hidden * context
    took_ms = costs.step_ms(decoding=batch, context_tokens=batch * context)
    return _share(batch * answer_flops, took_ms, setup.gpu.flops)


def _search(search: SearchCosts, batch: int) -> float:
    flops = 2 * search.index.dim * search.index.rows_per_extend * batch
    return _share(flops, search.extend_ms(batch), search.gpu.flops)


def _share(flops: float, took_ms: float, peak: float) -> float:
    return flops / (took_ms / 1e3 * peak)
