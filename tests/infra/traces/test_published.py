"""Azure's and BurstGPT's CSV files."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from infra.traces.formats import read
from infra.traces.trace import Arrival
from schemas.errors import ConfigError
from tests.infra.traces.samples import AZURE, BURSTGPT


def test_azure_requests_have_no_session_and_relative_times(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE)
    trace = read(path)
    assert trace.format == "azure"
    assert [*trace.arrivals] == [
        Arrival(at_ms=0.0, prompt_tokens=4_808, output_tokens=10),
        Arrival(at_ms=52.0, prompt_tokens=3_180, output_tokens=0),
    ]
    began = datetime(2023, 11, 16, 18, 17, 3, 979_960, UTC)
    assert trace.began_unix_ms == round(began.timestamp() * 1e3)


def test_azure_trace_of_2024_has_time_zone(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,1,2\n"
    )
    assert read(path).began_unix_ms == 1_715_299_200_010


def test_burstgpt_conversations_have_sessions(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(BURSTGPT)
    alone, turn = read(path).arrivals
    assert alone == Arrival(
        at_ms=5_000.0, prompt_tokens=472, output_tokens=18, model="ChatGPT", total_ms=None
    )
    assert (turn.at_ms, turn.session_id, turn.total_ms) == (45_500.0, "12", 3_250.0)
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,API log\n"
    )
    assert read(path).arrivals[0] == alone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE + "today,1,2\n", r"a\.csv:4: TIMESTAMP: expected a time such as .*, found 'today'"),
        (
            AZURE + "2023-11-16 18:17:04,-1,2\n",
            r":4: ContextTokens: expected a whole number from 0",
        ),
        (AZURE + "2023-11-16 18:17:04,1\n", r":4: GeneratedTokens: .*found nothing"),
        (BURSTGPT + "x,,,GPT-4,1,2,3,API log\n", r":4: Timestamp: expected a number from 0"),
        (BURSTGPT + "nan,,,GPT-4,1,2,3,API log\n", r":4: Timestamp: expected a number from 0"),
    ],
)
def test_published_trace_parse_error_names_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(path)
