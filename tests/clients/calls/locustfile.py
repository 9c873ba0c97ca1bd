"""locust's OpenAI users: chats, responses and embeddings."""

from locust import task
from locust.contrib.oai import OpenAIUser

MESSAGES = [{"role": "user", "content": "Hello"}]


class Caller(OpenAIUser):
    """Calls one endpoint after the other."""

    @task
    def all_of_them(self) -> None:
        chats = self.client.chat.completions
        assert chats.create(model="sim", messages=MESSAGES, max_tokens=4).choices
        assert self.client.responses.create(model="sim", input="Hello", max_output_tokens=4).output
        assert self.client.embeddings.create(model="hash", input="Hello").data
