"""Fields that are not in the request models: what is harmless, what is not supported, and what to
do instead.

An unknown field is refused, so that a misspelt parameter is not silently ignored.
"""

from collections.abc import Mapping
from typing import Any

from schemas.errors import InvalidRequest

# Sent by clients as a matter of course; they change nothing that is generated here.
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
    }
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
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
    "continue_final_message": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": ([],),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": (),
    "images": ([],),
    "input_audio": (),
}
_ADVICE = {
    "tools": "tool calling is not served; describe the tools in a message",
    "functions": "function calling is not served; describe the functions in a message",
    "tool_choice": "tool calling is not served; leave it out",
    "function_call": "function calling is not served; leave it out",
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
    "truncate_prompt_tokens": "shorten the prompt in the client",
    "allowed_token_ids": "use `structured_outputs` or `logit_bias`",
}


def refuse_extras(extras: Mapping[str, Any] | None) -> None:
    """Raise InvalidRequest for the first field that would have to change the answer."""
    for name, value in (extras or {}).items():
        if name in HARMLESS or value is None:
            continue
        if name not in NEUTRAL:
            raise InvalidRequest(f"{name}: unknown field; check its spelling or leave it out", name)
        if not any(value == neutral for neutral in NEUTRAL[name]):
            advice = _ADVICE.get(name, "leave it out")
            raise InvalidRequest(f"{name}: not supported; {advice}", name)
