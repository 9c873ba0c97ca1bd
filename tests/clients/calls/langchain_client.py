"""LangChain: chats, streams, JSON forms, embeddings, responses, and what it does when too long."""

import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL = sys.argv[1] + "/v1"


class Pier(BaseModel):
    """What an answer is to be."""

    pier: int


for by_responses in (False, True):
    chat = ChatOpenAI(
        base_url=URL, api_key="x", model="sim", max_tokens=40, use_responses_api=by_responses
    )
    assert chat.invoke("Hello").text
    assert "".join(chunk.text for chunk in chat.stream("Hello"))
    formed = chat.with_structured_output(Pier, method="json_schema")
    assert isinstance(formed.invoke("Where?"), Pier)
    history = [
        HumanMessage("Hello"),
        AIMessage("", tool_calls=[{"name": "f", "args": {"x": 1}, "id": "c"}]),
        ToolMessage("1", tool_call_id="c"),
    ]
    assert chat.invoke(history).text
    try:
        chat.invoke("word " * 9_000)
    except ContextOverflowError:
        pass
    else:
        raise AssertionError("a prompt that is too long is an error")
embeddings = OpenAIEmbeddings(
    base_url=URL, api_key="x", model="hash", check_embedding_ctx_length=False
)
assert len(embeddings.embed_documents(["a", "", "b"])) == 3
