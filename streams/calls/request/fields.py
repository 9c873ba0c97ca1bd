"""Fields outside of the request models, and fields with a few allowed words.

Unknown fields are refused, so that a misspelt parameter is not silently ignored. Some known fields
change nothing here, others are accepted with neutral values only; the error says what to do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import InvalidRequest
from streams.calls.config import GatewaySettings
from streams.calls.errors import shorten

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
        "return_tokens_as_token_ids",
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
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "documents": ([],),
    "chat_template": (),
    "spaces_between_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "add_special_tokens": (False,),
    "early_stopping": (False,),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "watermarking": (False,),
    "vllm_xargs": ({},),
    "prompt_embeds": (),
    "return_prompt_text": (False,),
    "routed_experts_prompt_start": (0,),
    "moderation": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "ec_transfer_params": ({},),
    "kv_transfer_params": (),
    "images": ([],),
    "input_audio": (),
}
EMBEDDING_NEUTRAL = NEUTRAL | {
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "truncation_side": ("right",),
    "padding": ("do_not_pad",),
    "priority": (0,),
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
    "instruction": ("",),
    "max_tokens_per_query": (0,),
    "max_tokens_per_doc": (0,),
}
_ADVICE = {
    "modalities": "only text is served; leave it out or send ['text']",
    "audio": "only text is served; leave it out",
    "images": "only text is served; leave it out",
    "service_tier": "use `priority` (interactive, standard or batch)",
    "echo": "prepend the prompt to the answer in the client",
    "best_of": "use `n` and choose in the client",
    "suffix": "put the suffix into the prompt in the model's own fill-in-the-middle form",
    "use_beam_search": "use sampling with `n`",
    "prompt_logprobs": "only log-probabilities of generated tokens are served; leave it out",
    "documents": "put the passages into a message",
    "chat_template": "the model's own template is used; pass variables as `chat_template_kwargs`",
    "logprob_token_ids": "use `logprobs` with up to 20 likely tokens",
    "truncate_prompt_tokens": "a model sees the beginning of a text, as much as it can",
    "messages": "send texts as `input`",
    "return_prompt_text": "use /tokenize with return_token_strs",
    "allowed_token_ids": "use `structured_outputs` or `logit_bias`",
}


def refuse_extras(
    extras: Mapping[str, Any] | None, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> None:
    """Raise InvalidRequest for the first field that would have to change the answer."""
    for name, value in (extras or {}).items():
        if name in HARMLESS or value is None:
            continue
        if name not in neutral:
            raise InvalidRequest(f"{name}: unknown field; check its spelling or leave it out", name)
        if value not in neutral[name]:
            advice = _ADVICE.get(name, "leave it out")
            raise InvalidRequest(f"{name}: not supported; {advice}", name)


def priority_of(settings: GatewaySettings, value: Any, param: str) -> str | None:
    """Return a priority class by its name; None for vLLM's default 0. `param` names the field in
    errors."""
    return None if value is None or value == 0 else one_of(settings.priorities, value, param)


def one_of(names: Sequence[str], value: Any, param: str) -> str | None:
    """Return a value that is among the names, or None; raises InvalidRequest that names `param`."""
    if value is None:
        return None
    if value not in names:
        raise InvalidRequest(
            f"{param}: expected one of {', '.join(names)}, found {shorten(value)}", param
        )
    return str(value)
