"""A gateway of two models, and of an adapter over the first."""

from typing import Any

from schemas.model.parsers import ParserNames
from streams.calls.request.served import ModelCard
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import MODEL

LAW = ModelCard(
    name="org/law@2",
    model=MODEL,
    adapter="org/law@2",
    root="law-2",
    max_model_len=512,
    created_s=1,
    parsers=ParserNames(tool="hermes", reasoning="none"),
)
SMALL = ModelCard(name="small", model="small", max_model_len=64, created_s=1, reads_passages=False)
NAMES = (MODEL, LAW.name, SMALL.name)


def gateway_of_three(**settings: Any) -> InProcessGateway:
    """A gateway of two models, and an adapter over the first."""
    gateway = InProcessGateway(other_cards=[LAW, SMALL], **settings)
    gateway.answer_with("hello", prompt_tokens=3)
    return gateway
