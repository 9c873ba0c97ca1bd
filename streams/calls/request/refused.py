"""The fields of OpenAI's and vLLM's calls that are refused, and why.

Errors say the reasons, and so does the table of `infra/docs/integrate.md`, which a test sends row
by row. A value that would not change the answer is accepted.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from schemas.errors import InvalidRequest

WHY_NO_PROMPT_LOGPROBS: Final = (
    "log-probabilities of a prompt are not computed, because its KV may come from a cache or from "
    "another worker; leave it out"
)
_ONLY_TEXT = "only text is served; leave it out"
_NO_BEAMS = "only beam search, which is refused, reads it; leave it out"
_TRANSFERS = "routers decide which KV moves; leave it out"
_BEGINNING = "a model sees the beginning of a text, as much as it can; leave it out"
_NO_TEMPLATE = "texts are embedded without a chat template; leave it out"
_NUMBERS = "vectors have little-endian 32-bit floats, as numbers or base64; leave it out"


class RefusedField(NamedTuple):
    """Why a field is refused and what to do instead, and its values without effect besides null."""

    why: str
    neutral: tuple[Any, ...] = ()


# Clients send these by default; they do not change the answer.
HARMLESS = frozenset(
    {
        "store",
        "metadata",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        # vLLM's: the client's own id, and options of chunks and rendering.
        "request_id",
        "return_token_offsets",
        "include_reasoning",
        "stream_interval",
        "mm_payload",
        "return_mm_kwargs",
        "guided_decoding_backend",
    }
)
REFUSED: Mapping[str, RefusedField] = {
    "modalities": RefusedField(
        "only text is served; leave it out or send ['text']", (["text"], [])
    ),
    "audio": RefusedField(_ONLY_TEXT),
    "images": RefusedField(_ONLY_TEXT, ([],)),
    "input_audio": RefusedField(_ONLY_TEXT),
    "media_io_kwargs": RefusedField(_ONLY_TEXT, ({},)),
    "mm_processor_kwargs": RefusedField(_ONLY_TEXT, ({},)),
    "prediction": RefusedField("no answer is drafted from a caller's text; leave it out"),
    "verbosity": RefusedField(
        "models have no such setting; say in the prompt how long the answer is to be", ("medium",)
    ),
    "web_search_options": RefusedField(
        "the web is not searched; search your own documents by `retrieval`"
    ),
    "service_tier": RefusedField(
        "classes of service have other names here; use `priority` (interactive, standard or batch)",
        ("auto", "default"),
    ),
    "moderation": RefusedField("answers are not moderated; leave it out"),
    "best_of": RefusedField(
        "it would generate answers and drop them; use `n` and choose in the client", (1,)
    ),
    "suffix": RefusedField(
        "each model has its own marks for it; put the suffix into the prompt in the model's "
        "fill-in-the-middle form",
        ("",),
    ),
    "echo": RefusedField("only completions have it; leave it out", (False,)),
    "prompt_logprobs": RefusedField(WHY_NO_PROMPT_LOGPROBS),
    "logprob_token_ids": RefusedField(
        "the log has the likely tokens only; use `logprobs` with up to 20 of them", ([],)
    ),
    "use_beam_search": RefusedField(
        "each step of a beam search would be a request of its own; use sampling with `n`", (False,)
    ),
    "length_penalty": RefusedField(_NO_BEAMS, (1.0,)),
    "early_stopping": RefusedField(_NO_BEAMS, (False,)),
    "documents": RefusedField(
        "templates get no documents; put them into a message, or use `retrieval`", ([],)
    ),
    "chat_template": RefusedField(
        "a caller's template could write control tokens; the model's own is used, with variables "
        "as `chat_template_kwargs`"
    ),
    "add_special_tokens": RefusedField(
        "the model's template writes the special tokens of a chat; leave it out", (False,)
    ),
    "spaces_between_special_tokens": RefusedField(
        "only tokenizers that are not used here read it; leave it out", (True,)
    ),
    "return_prompt_text": RefusedField(
        "answers do not show how a prompt was rendered; use /tokenize with return_token_strs",
        (False,),
    ),
    "prompt_embeds": RefusedField("a prompt on the log is token ids; send text or token ids"),
    "thinking_token_budget": RefusedField(
        "only chats have reasoning that is told apart; limit the whole answer by `max_tokens`",
        (-1,),
    ),
    "repetition_detection": RefusedField(
        "an answer does not end because it repeats; use `repetition_penalty` or `max_tokens`"
    ),
    "watermarking": RefusedField("answers get no watermark; leave it out", (False,)),
    "vllm_xargs": RefusedField("no plugin of an engine gets fields of a call; leave it out", ({},)),
    "routed_experts_prompt_start": RefusedField(
        "answers do not name the experts of a model; leave it out", (0,)
    ),
    "ec_transfer_params": RefusedField(_TRANSFERS, ({},)),
    "kv_transfer_params": RefusedField(_TRANSFERS),
}
EMBEDDING_REFUSED: Mapping[str, RefusedField] = {
    **REFUSED,
    "messages": RefusedField("chats are not embedded; send texts"),
    "chat_template_kwargs": RefusedField(_NO_TEMPLATE, ({},)),
    "add_generation_prompt": RefusedField(_NO_TEMPLATE, (False,)),
    "continue_final_message": RefusedField(_NO_TEMPLATE, (False,)),
    "instruction": RefusedField("no template adds it to a text; put it before the text", ("",)),
    "add_special_tokens": RefusedField(
        "models get the special tokens that they were trained with; leave it out", (True,)
    ),
    "truncate_prompt_tokens": RefusedField(_BEGINNING, (-1,)),
    "truncation_side": RefusedField(_BEGINNING, ("right",)),
    "max_tokens_per_query": RefusedField(_BEGINNING, (0,)),
    "max_tokens_per_doc": RefusedField(_BEGINNING, (0,)),
    "padding": RefusedField("texts of any length are embedded; leave it out", ("do_not_pad",)),
    "priority": RefusedField("texts are embedded in their order; leave it out", (0,)),
    "use_activation": RefusedField("vectors are always normalised; leave it out", (True,)),
    "embed_dtype": RefusedField(_NUMBERS, ("float32",)),
    "endianness": RefusedField(_NUMBERS, ("native", "little")),
}


def refuse_extras(
    extras: Mapping[str, Any] | None, refused: Mapping[str, RefusedField] = REFUSED
) -> None:
    """Raise InvalidRequest for the first field that would have to change the answer."""
    for name, value in (extras or {}).items():
        if name in HARMLESS or value is None:
            continue
        if name not in refused:
            raise InvalidRequest(f"{name}: unknown field; check its spelling or leave it out", name)
        if value not in refused[name].neutral:
            raise InvalidRequest(f"{name}: not supported; {refused[name].why}", name)
