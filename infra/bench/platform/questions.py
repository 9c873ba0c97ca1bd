"""Draws the questions of the platform benchmark from a seed: prompts, HTTP calls or batch lines.

A quarter of the questions require an answer by a JSON schema. Half of the prompts are Avro, half
JSON. Pure.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schemas.codec import Codec
from schemas.records import Prompt
from workers.models.sim import WORDS

PROMPT_WORDS, ANSWER_TOKENS, FORM_TOKENS = (8, 40), 24, 120
FORM_EVERY, AVRO_EVERY = 4, 2
PER_KEY = 10  # mean number of questions with one key
# With fewer keys a short run would spend its end waiting for the key with the most questions.
KEYS_MIN = 512
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["order", "refund", "other"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "urgent": {"type": "boolean"},
    },
    "required": ["kind", "count", "urgent"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": SCHEMA}}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadQuestion:
    """One question of the platform benchmark."""

    number: int
    key: str
    text: str
    seed: int

    @property
    def has_form(self) -> bool:
        return self.number % FORM_EVERY == 0

    @property
    def max_tokens(self) -> int:
        return FORM_TOKENS if self.has_form else ANSWER_TOKENS

    def prompt(self, codec: Codec) -> bytes:
        """Return the question as the value of a prompt record."""
        fields: dict[str, Any] = {
            "text": self.text,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "metadata": json.dumps({"number": self.number}),
        }
        if self.has_form:
            fields["response_format"] = json.dumps(FORM)
        if self.number // FORM_EVERY % AVRO_EVERY == 0:
            return codec.encode(Prompt(**fields))
        decoded = {name: json.loads(fields[name]) for name in _NESTED if name in fields}
        return json.dumps({**fields, **decoded}).encode()

    def body(self, model: str) -> dict[str, Any]:
        """Return the body of a chat completion call."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        return body | ({"response_format": FORM} if self.has_form else {})

    def line(self, model: str) -> dict[str, Any]:
        """Return the question as one line of a batch file."""
        return {
            "custom_id": f"line-{self.number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": self.body(model),
        }


_NESTED = ("response_format", "metadata")


def draw_questions(count: int, seed: int) -> Iterator[LoadQuestion]:
    """Yield `count` questions that are drawn from the seed."""
    rng = random.Random(f"platform {seed}")
    keys = max(KEYS_MIN, count // PER_KEY)
    for number in range(count):
        yield LoadQuestion(
            number=number,
            key=f"customer-{rng.randrange(keys)}",
            text=" ".join(rng.choices(WORDS, k=rng.randint(*PROMPT_WORDS))),
            seed=rng.randrange(1 << 30),
        )
