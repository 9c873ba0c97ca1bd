"""Implements `trivium replay --predict`: outcomes under other settings, on workers as recorded."""

from pathlib import Path
from typing import Any

from infra.terminal.output import stdout_console


def predict_figures(file: Path, overrides: dict[str, str]) -> dict[str, Any]:
    """Return figures as recorded, as predicted, and as predicted with the overrides."""
    from infra.prediction.figures import figures
    from infra.prediction.predictor import predict
    from infra.prediction.speeds import measure_speeds
    from infra.prediction.traffic import read
    from infra.replay.redeciding import with_overrides

    traffic = read(file)
    speeds = measure_speeds(traffic)
    rows = {"recorded": figures(traffic.outcomes.values())}
    variants = {"predicted": {}, ", ".join(f"{k}={v}" for k, v in overrides.items()): overrides}
    for name, settings in variants.items():
        if name:
            prediction = predict(traffic, speeds, with_overrides(traffic.settings, settings))
            rows[name] = figures(prediction.outcomes.values()) | {"unserved": prediction.unserved}
    return rows


def show(rows: dict[str, Any]) -> None:
    """Print the predicted figures as a table."""
    from infra.prediction.figures import table

    stdout_console().print(table("times in ms", rows))
