"""pydantic-ai: text, streams, and output in a JSON form; with chats and with responses."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Pier(BaseModel):
    """What an answer is to be."""

    pier: int


async def main() -> None:
    provider = OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="x")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("sim", provider=provider)
        agent = Agent(model, instructions="Be brief.", model_settings={"max_tokens": 40})
        first = await agent.run("Hello")
        assert first.output
        assert (await agent.run("And?", message_history=first.all_messages())).output
        async with agent.run_stream("Hello") as stream:
            assert "".join([text async for text in stream.stream_text(delta=True)])
        formed = Agent(model, output_type=NativeOutput(Pier))
        assert isinstance((await formed.run("Where?")).output, Pier)


asyncio.run(main())
