"""Reads the CSV files that Azure and BurstGPT publish: times and lengths, no texts, no block ids.

Azure (`AzureLLMInferenceDataset2023.md` and `2024.md` of its public dataset, CC-BY 4.0): TIMESTAMP,
ContextTokens, GeneratedTokens. BurstGPT (its README, release 1.2): Timestamp in s, Session ID and
Elapsed time in newer files, Model, Request tokens, Response tokens (0 for a failed call).
"""

from datetime import UTC, datetime
from pathlib import Path

from infra.traces.fields import Fields, csv_rows
from infra.traces.trace import Arrival, Trace, TraceBuilder

AZURE = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
BURSTGPT = {"Timestamp", "Model", "Request tokens", "Response tokens"}


def read_azure(path: Path) -> Trace:
    """Return requests without sessions; times count from the first line."""
    builder, began = TraceBuilder("azure"), None
    for row in csv_rows(path):
        at = _time(row)
        began = began or at
        builder.arrivals.append(
            Arrival(
                at_ms=(at - began).total_seconds() * 1e3,
                prompt_tokens=row.count("ContextTokens"),
                output_tokens=row.count("GeneratedTokens"),
            )
        )
    return builder.build(began_unix_ms=round(began.timestamp() * 1e3) if began else 0)


def _time(row: Fields) -> datetime:
    text = row.text("TIMESTAMP")
    try:
        timestamp = datetime.fromisoformat(text)
    except ValueError:
        raise row.error("TIMESTAMP", "a time such as 2023-11-16 18:17:03.97", text) from None
    return timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=UTC)


def read_burstgpt(path: Path) -> Trace:
    """Return calls of an API, without sessions, and conversations, with sessions."""
    builder = TraceBuilder("burstgpt")
    for row in csv_rows(path):
        builder.arrivals.append(
            Arrival(
                at_ms=row.number("Timestamp") * 1e3,
                prompt_tokens=row.count("Request tokens"),
                output_tokens=row.count("Response tokens"),
                session_id=row.text("Session ID") if row.has("Session ID") else "",
                model=row.text("Model"),
                total_ms=row.number("Elapsed time") * 1e3 if row.has("Elapsed time") else None,
            )
        )
    return builder.build()
