"""Names of the parsers that find tool calls and reasoning in the answers of a model.

The parsers are vLLM's, and run in the workers. Here are their names, so that gateways and commands
can check a setting and tell which parsers are used, without an import of vLLM.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from schemas.errors import ConfigError
from schemas.model.files import model_folder, read_json, template_source_of
from schemas.model.parser_rules import NONE, reasoning_rule, tool_rule
from schemas.settings import ModelSettings

AUTO = "auto"
HF = "hf"  # reads the rules that the model's own tokenizer_config.json has
TOOL_PARSERS = frozenset(
    "apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 "
    "deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc "
    "granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3 "
    "lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax_m2 "
    "minimax_m3 mistral muse_glimmer olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic "
    "qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 xlam".split()
)
REASONING_PARSERS = frozenset(
    "cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 "
    "gemma4 glm45 glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling "
    "k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 "
    "mistral muse_glimmer nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3 "
    "step3p5".split()
)
# Reasoning parsers that say between which texts reasoning stands, so that vLLM can bound it.
_BOUNDED = frozenset(
    "deepseek_r1 deepseek_v4 deepseek_v41 ernie45 gemma4 glm45 glm47 granite_thinking_parser "
    "holo2 hy_v3 hy_v4 k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m3 "
    "mistral nemotron_v3 plamo3 qwen3 seed_oss step3 step3p5".split()
)
_THINK = ("<think>", "</think>")
# Tokens without which a parser cannot be made, by name; a guess must not stop a worker's start.
_TOOL_TOKENS: Mapping[str, Collection[str]] = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama3_json": ("<|python_tag|>",),
    "llama4_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
}
_REASONING_TOKENS: Mapping[str, Collection[str]] = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "ernie45": _THINK,
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[TOOL_CALLS]",),
    "olmo3": ("</", "Ġ</", "think", ">"),
    "poolside_v1": ("<assistant>", *_THINK),
    "step3": ("</think>",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserNames:
    """The parsers of one model: names that vLLM knows, or "none"."""

    tool: str = NONE
    reasoning: str = NONE

    @property
    def bounds_reasoning(self) -> bool:
        """Return whether an engine can end the reasoning of the model after a number of tokens."""
        return self.reasoning in _BOUNDED


def guess(template: str, config: Mapping[str, Any]) -> ParserNames:
    """Return the parsers for a chat template and the content of config.json.

    A model whose form no rule knows gets "none".
    """
    plain, kind = template.replace('\\"', '"'), _kind(config)
    return ParserNames(tool=tool_rule(plain, kind), reasoning=reasoning_rule(plain, kind))


NO_PARSERS: Final = ParserNames(tool=NONE, reasoning=NONE)


def known_parsers(model: ModelSettings) -> ParserNames:
    """Return the parsers of a model without a download; none if only files that are not here would
    tell. Raise ConfigError."""
    folder = Path(model.path)
    has_files = bool(model.path) and folder.is_dir()
    settings = (model.tool_parser, model.reasoning_parser)
    tool, reasoning = (NONE if name == AUTO and not has_files else name for name in settings)
    return resolve(tool, reasoning, folder)


def parsers_of(model: ModelSettings) -> ParserNames:
    """Return the parsers of a model, whose small files are downloaded if it is no folder.

    Raise ConfigError.
    """
    return resolve(model.tool_parser, model.reasoning_parser, model_folder(model))


def resolve(tool_parser: str, reasoning_parser: str, folder: Path) -> ParserNames:
    """Return the parsers by the settings of these names, for the model in a folder.

    "auto" is guessed from the model's files, "none" is none. Raise ConfigError for a name that vLLM
    does not know, and for `hf` together with another parser.
    """
    _check("tool_parser", tool_parser, TOOL_PARSERS)
    _check("reasoning_parser", reasoning_parser, REASONING_PARSERS)
    names = ParserNames(tool=tool_parser, reasoning=reasoning_parser)
    if AUTO in (tool_parser, reasoning_parser):
        names = _completed(names, _guess_of(folder, uses_hf=HF in (tool_parser, reasoning_parser)))
    if HF in (names.tool, names.reasoning) and not {names.tool, names.reasoning} <= {HF, NONE}:
        raise ConfigError(
            f"model.tool_parser, model.reasoning_parser: expected {HF!r} alone or for both, found "
            f"{names.tool!r} and {names.reasoning!r}"
        )
    return names


def _completed(names: ParserNames, guessed: ParserNames) -> ParserNames:
    """Return the names, with those guessed instead of "auto"."""
    return ParserNames(
        tool=guessed.tool if names.tool == AUTO else names.tool,
        reasoning=guessed.reasoning if names.reasoning == AUTO else names.reasoning,
    )


def _guess_of(folder: Path, *, uses_hf: bool) -> ParserNames:
    """Return what is guessed from a model's files, without parsers that lack their tokens.

    The rules in the model's own files are used if no other parser is known, or if `uses_hf`.
    """
    guessed = guess(template_source_of(folder) or "", read_json(folder / "config.json"))
    if not uses_hf:
        guessed = ParserNames(
            tool=_with_tokens(guessed.tool, _TOOL_TOKENS, folder),
            reasoning=_with_tokens(guessed.reasoning, _REASONING_TOKENS, folder),
        )
        if (guessed.tool, guessed.reasoning) != (NONE, NONE):
            return guessed
    form = read_json(folder / "tokenizer_config.json").get("response_template")
    fields = form.get("fields") if isinstance(form, dict) else None
    has = fields if isinstance(fields, dict) else {}
    return ParserNames(
        tool=HF if "tool_calls" in has else NONE, reasoning=HF if "thinking" in has else NONE
    )


def _with_tokens(name: str, needed: Mapping[str, Collection[str]], folder: Path) -> str:
    if name not in needed:
        return name
    vocabulary = _vocabulary(folder)
    return name if all(token in vocabulary for token in needed[name]) else NONE


def _vocabulary(folder: Path) -> frozenset[str]:
    tokenizer = read_json(folder / "tokenizer.json")
    names = tokenizer.get("model", {}).get("vocab", [])  # an object, or pairs of name and score
    texts = names if isinstance(names, dict) else [name for name, _ in names]
    return frozenset([*texts, *(token["content"] for token in tokenizer.get("added_tokens", []))])


def _kind(config: Mapping[str, Any]) -> str:
    """Return a model's types and architectures as one text in small letters."""
    inner = config.get("text_config")
    configs = (config, inner) if isinstance(inner, dict) else (config,)
    parts = [[part.get("model_type"), part.get("architectures")] for part in configs]
    return json.dumps(parts).lower().replace("hy_v", "hyv").replace("gpt_bigcode", "gptbigcode")


def _check(setting: str, name: str, parsers: Collection[str]) -> None:
    if name not in parsers and name not in (AUTO, NONE):
        raise ConfigError(
            f"model.{setting}: expected {AUTO!r}, {NONE!r} or one of vLLM's: "
            f"{', '.join(sorted(parsers))}; found {name!r}"
        )
