"""Guesses from a chat template which of vLLM's parsers understand the model's answers.

A rule names the parser, and the markers that a template must have: what the parser looks for in an
answer, as a template writes it in earlier turns or in its instruction. Rules are tried in order, so
those whose markers are in other models' templates too come later. Where models write the same
markers and need different parsers, `kinds` are parts of the model type or the architecture; a rule
without kinds follows for all others, with the more general parser. `schemas/model/parsers.py` calls
this.
"""

from collections.abc import Iterable
from dataclasses import dataclass

NONE = "none"


@dataclass(frozen=True, slots=True)
class _Rule:
    parser: str
    markers: tuple[str, ...]
    kinds: tuple[str, ...] = ()

    def matches(self, template: str, kind: str) -> bool:
        is_kind = not self.kinds or any(part in kind for part in self.kinds)
        return is_kind and all(marker in template for marker in self.markers)


_TOOLS = (
    _Rule("k2_horizon", ("<ifm|tool_call",)),
    _Rule("muse_glimmer", ("<atem:invoke",)),
    _Rule("plamo3", ("<|plamo:begin_tool_request",)),
    _Rule("minimax_m3", ("]<]minimax[>[",)),
    _Rule("minimax_m2", ("<minimax:tool_call>",)),
    _Rule("seed_oss", ("<seed:tool_call>",)),
    _Rule("dots", ("<dots_function_call>",)),
    _Rule("longcat", ("<longcat_tool_call>",)),
    _Rule("step3", ("<steptml:invoke",)),
    _Rule("deepseek_v41", ("｜DSML｜ calls",)),
    _Rule("deepseek_v32", ("｜DSML｜", "function_calls>")),
    _Rule("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    _Rule("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _Rule("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    _Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Rule("kimi_k3", ("<|open|>", "<|sep|>")),
    _Rule("inkling", ("<|content_invoke_tool_json|>",)),
    # vLLM reads this form only where the model type is `gpt_oss`
    _Rule("openai", ("<|channel|>", "<|message|>"), ("gpt_oss", "gptoss")),
    _Rule(NONE, ("<|START_ACTION|>",)),  # Cohere's needs a package that vLLM does not install
    _Rule("gemma4", ("<|tool_call>",)),
    _Rule("functiongemma", ("<start_function_call>",)),
    _Rule("lfm2", ("<|tool_call_start|>",)),
    _Rule("lfm2", ("List of tools: ",), ("lfm2",)),  # some templates show no calls
    _Rule("apertus", ("<|tools_prefix|>",)),
    _Rule("internlm", ("<|action_start|>", "<|plugin|>")),
    _Rule("gigachat3", ("<|function_call|>",)),
    _Rule("gigachat3", ("function call", "<|role_sep|>")),
    _Rule("mistral", ("[TOOL_CALLS]",)),
    _Rule("phi4_mini_json", ("functools[",)),
    _Rule("xlam", ("xLAM",)),  # a bare JSON list; its instruction says the name
    _Rule("granite", ("<|tool_call|>", "<|start_of_role|>")),
    _Rule("granite-20b-fc", ("<function_call>",), ("gptbigcode",)),
    # arguments as tags: Hunyuan, Laguna and Ling write those of GLM
    _Rule("hy_v3", ("<arg_key",), ("hyv3",)),
    _Rule("hy_v4", ("<arg_key",), ("hyv4",)),
    _Rule("hy_v3", ("<arg_key", "<tool_sep")),
    _Rule("poolside_v1", ("<arg_key>",), ("laguna",)),
    _Rule("ling3", ("<arg_key>",), ("bailing",)),
    _Rule("glm45", ("<arg_key>",)),
    # the same XML
    _Rule("step3p5", ("<function=", "<parameter="), ("step3p",)),
    _Rule("mimo", ("<function=", "<parameter="), ("mimo",)),
    _Rule("qwen3_coder", ("<function=", "<parameter=")),
    _Rule("minicpm5", ("<function name=", "<param name=")),
    _Rule("olmo3", ("<function_calls>",), ("olmo",)),
    # the same list of JSON
    _Rule("hunyuan_a13b", ("<tool_calls>",), ("hunyuan",)),
    _Rule("jamba", ("<tool_calls>[",)),
    # JSON objects between the same tags
    _Rule("ernie45", ("<tool_call>", "arguments"), ("ernie",)),
    _Rule("granite4", ("<tool_call>", "arguments", "<|start_of_role|>")),
    _Rule("hermes", ("<tool_call>", "arguments")),
    _Rule(NONE, ("<TOOLCALL>",)),  # of Nemotron: vLLM has no parser for it
    _Rule("llama4_pythonic", ("<|python_start|>", "[func_name1(")),
    _Rule("pythonic", ("[func_name1(",)),
    _Rule("llama4_json", ("<|python_tag|>", '"parameters"'), ("llama4",)),
    _Rule("llama3_json", ("<|python_tag|>", '"parameters"')),
    _Rule("llama3_json", ("<|start_header_id|>", '"parameters"')),
)

_REASONING = (
    _Rule("k2_horizon", ("<ifm|think",)),
    _Rule("muse_glimmer", ("to=self<|message|>",)),
    _Rule("plamo3", ("<|plamo:begin_think",)),
    _Rule("minimax_m3", ("<mm:think>",)),
    _Rule("seed_oss", ("<seed:think>",)),
    _Rule("inkling", ("<|content_thinking|>",)),
    _Rule("kimi_k3", ("<|open|>", "<|sep|>", "think")),
    _Rule("openai_gptoss", ("<|channel|>", "<|message|>"), ("gpt_oss", "gptoss")),
    _Rule("gemma4", ("<|channel>",)),
    _Rule("mistral", ("[THINK]",)),
    _Rule("granite", ("Here is my thought process:",)),
    _Rule("hy_v3", ("think",), ("hyv3",)),  # the ends of its tags differ between models
    _Rule("hy_v4", ("think",), ("hyv4",)),
    # the tags `<think>` and `</think>`, with what differs between the families
    _Rule("poolside_v1", ("</think>", "<assistant>"), ("laguna",)),
    _Rule("ling3", ("</think>", "<arg_key>"), ("bailing",)),
    _Rule("glm45", ("</think>", "<arg_key>")),
    _Rule("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    _Rule("minimax_m2", ("</think>", "<minimax:tool_call>")),
    _Rule("step3p5", ("</think>",), ("step3p",)),
    _Rule("step3", ("<think>",), ("step3",)),
    _Rule("mimo", ("</think>", "<function="), ("mimo",)),
    _Rule("nemotron_v3", ("</think>", "<function="), ("nemotron",)),
    _Rule("granite_thinking_parser", ("</think>", "<function="), ("granite",)),
    _Rule("minicpmv", ("</think>",), ("minicpmv",)),
    _Rule("ernie45", ("</think>",), ("ernie",)),
    _Rule("hunyuan_a13b", ("<think>",), ("hunyuan",)),
    _Rule("deepseek_v41", ("</think>", "｜DSML｜ calls")),
    _Rule("deepseek_v4", ("</think>", "｜DSML｜", "tool_calls>")),
)


def tool_rule(template: str, kind: str) -> str:
    """Return the name of the tool parser for a template; `kind` is the model's type."""
    return _first(_TOOLS, template, kind)


def reasoning_rule(template: str, kind: str) -> str:
    """Return the name of the reasoning parser for a template; `kind` is the model's type."""
    by_marker = _first(_REASONING, template, kind)
    return by_marker if by_marker != NONE else _think_rule(template, kind)


def _first(rules: Iterable[_Rule], template: str, kind: str) -> str:
    return next((rule.parser for rule in rules if rule.matches(template, kind)), NONE)


def _think_rule(template: str, kind: str) -> str:
    """Return the parser for `<think>` by how the template opens the answer.

    Both `qwen3` and `deepseek_r1` take an answer for reasoning until `</think>`. So neither may be
    used for a model that does not always begin with reasoning, unless its template closes the
    reasoning of the others.
    """
    if "</think>" not in template:
        return NONE
    opening = template[template.rfind("add_generation_prompt") :]
    if " thinking = false" in template:  # as DeepSeek V3.1, unless the request turns it on
        return "deepseek_v3"
    if "enable_thinking" in template:  # without reasoning, the template writes both tags
        return "qwen3" if "think>" in opening else NONE
    if "olmo" in kind:
        return "olmo3" if "<think>" in opening else NONE
    if "<｜Assistant｜>" in template:  # of DeepSeek R1, also where the model opens it
        return "deepseek_r1"
    if "<think>" in opening:
        return "qwen3" if "qwen" in kind else "deepseek_r1"
    return NONE
