"""Which parsers are guessed from a chat template, and which settings are refused."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.model import parser_rules
from schemas.model.parsers import (
    _REASONING_TOKENS,
    _TOOL_TOKENS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserNames,
    guess,
    parsers_of,
    resolve,
)
from schemas.settings import ModelSettings
from workers.models.folder import model_folder

OPENS = "{% if add_generation_prompt %}<assistant_turn><think>\n{% endif %}"
CLOSES = (
    "{% if add_generation_prompt %}<assistant_turn>{% if enable_thinking is false %}"
    "<think>\n\n</think>{% endif %}{% endif %}"
)
HISTORY = "{{ m.content.split('</think>')[-1] }}"
HERMES = 'Answer with <tool_call>\n{\\"name\\": <name>, \\"arguments\\": <object>}\n</tool_call>'
XML = (
    "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
)
GLM = "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"
DSML = "{% set dsml = '｜DSML｜' %}<{{ dsml }}"
R1 = "<｜Assistant｜><｜tool▁calls▁begin｜>function<｜tool▁sep｜>name\\n```json\\n{}\\n```"


def kind(model_type: str, *architectures: str) -> dict[str, Any]:
    """The part of config.json that a guess reads."""
    return {"model_type": model_type, "architectures": list(architectures)}


@pytest.mark.parametrize(
    ("template", "config", "tool", "reasoning"),
    [
        ("{{ messages }}", {}, "none", "none"),
        (HERMES, kind("qwen2"), "hermes", "none"),
        (HERMES + HISTORY + CLOSES, kind("qwen3"), "hermes", "qwen3"),
        (HERMES + HISTORY + OPENS, kind("qwen3"), "hermes", "qwen3"),
        (HERMES + HISTORY + OPENS, kind("llama"), "hermes", "deepseek_r1"),
        (HERMES + HISTORY + CLOSES, kind("minicpmv4_7"), "hermes", "minicpmv"),
        (HERMES + HISTORY, kind("qwen3"), "hermes", "none"),  # removes reasoning, may have none
        (HERMES, kind("ernie4_5_moe"), "ernie45", "none"),
        ("<|start_of_role|>" + HERMES, kind("granitemoehybrid"), "granite4", "none"),
        (XML, kind("qwen3_moe"), "qwen3_coder", "none"),
        (XML + CLOSES, kind("qwen3_5"), "qwen3_coder", "qwen3"),
        (XML + HISTORY + OPENS, kind("step3p7"), "step3p5", "step3p5"),
        (XML + HISTORY + CLOSES, kind("mimo_v2"), "mimo", "mimo"),
        (XML + HISTORY + CLOSES, kind("nemotron_h"), "qwen3_coder", "nemotron_v3"),
        (XML + HISTORY, kind("granite"), "qwen3_coder", "granite_thinking_parser"),
        (GLM + HISTORY, kind("glm4_moe"), "glm45", "glm45"),
        (GLM + HISTORY, kind("bailing_moe_v3"), "ling3", "ling3"),
        ("<assistant>" + GLM + HISTORY, kind("laguna"), "poolside_v1", "poolside_v1"),
        (GLM, {"architectures": ["HYV3ForCausalLM"]}, "hy_v3", "none"),
        ("{{ '<arg_key' + end + '<think' }}", kind("hy_v3"), "hy_v3", "hy_v3"),
        (GLM + HISTORY, {"architectures": ["HYV3ForCausalLM"]}, "hy_v3", "hy_v3"),
        (GLM + HISTORY, kind("hy_v4"), "hy_v4", "hy_v4"),
        (GLM + "<tool_sep>", {}, "hy_v3", "none"),
        (R1, kind("deepseek_v3"), "deepseek_v3", "none"),
        (R1 + HISTORY, kind("deepseek_v3"), "deepseek_v3", "deepseek_r1"),
        (R1 + HISTORY + OPENS, kind("qwen2"), "deepseek_v3", "deepseek_r1"),
        ("{% if not enable_thinking %}" + CLOSES, kind("deepseek_v32"), "none", "qwen3"),
        (
            "{% set thinking = false %}<｜tool▁calls▁begin｜></think>",
            kind("deepseek_v3"),
            "deepseek_v31",
            "deepseek_v3",
        ),
        (DSML + "function_calls>", kind("deepseek_v32"), "deepseek_v32", "none"),
        (DSML + "tool_calls></think>", kind("deepseek_v4"), "deepseek_v4", "deepseek_v4"),
        ("<｜DSML｜ calls></think>", kind("deepseek_v41"), "deepseek_v41", "deepseek_v41"),
        ("<|tool_calls_section_begin|>", kind("kimi_k2"), "kimi_k2", "none"),
        ("<think></think><|tool_calls_section_begin|>", {}, "kimi_k2", "kimi_k2"),
        ("{{ '<|open|>' + tag + '<|sep|>' }}{{ open('think') }}", {}, "kimi_k3", "kimi_k3"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", kind("mistral"), "mistral", "none"),
        ("[THINK][TOOL_CALLS]", kind("mistral3"), "mistral", "mistral"),
        ("<|channel|>analysis<|message|>", kind("gpt_oss"), "openai", "openai_gptoss"),
        ("<|channel|>analysis<|message|>", kind("other"), "none", "none"),
        ("<minimax:tool_call></think>", kind("minimax_m2"), "minimax_m2", "minimax_m2"),
        ("]<]minimax[>[<tool_call><mm:think>", {}, "minimax_m3", "minimax_m3"),
        ("<seed:think><seed:tool_call>", kind("seed_oss"), "seed_oss", "seed_oss"),
        ("<|START_THINKING|><|START_ACTION|>", kind("cohere2"), "none", "none"),
        ("<|tool_call>call:name{}<tool_call|><|channel>", {}, "gemma4", "gemma4"),
        ("<start_function_call>call:name{}", kind("gemma3"), "functiongemma", "none"),
        ("<|tool_call_start|>[name()]", kind("lfm2"), "lfm2", "none"),
        ("List of tools: [{{ tools }}]", kind("lfm2_moe"), "lfm2", "none"),
        ("<|start_of_role|><|tool_call|>[]", kind("granite"), "granite", "none"),
        ("Here is my thought process:", kind("granite"), "none", "granite"),
        ("<function_call>", kind("gpt_bigcode"), "granite-20b-fc", "none"),
        ("<function_calls>" + HISTORY + OPENS, kind("olmo3"), "olmo3", "olmo3"),
        ("<function_calls>", kind("olmo3"), "olmo3", "none"),
        ("<think><tool_calls>[]", kind("hunyuan_v1_moe"), "hunyuan_a13b", "hunyuan_a13b"),
        ("<tool_calls>[{}]", kind("jamba"), "jamba", "none"),
        ("functools[{}]", kind("phi3"), "phi4_mini_json", "none"),
        ("by the xLAM team", kind("llama"), "xlam", "none"),
        ('<|python_tag|>{\\"name\\": 1, \\"parameters\\": {}}', {}, "llama3_json", "none"),
        ('<|start_header_id|>{"parameters": {}}', kind("llama"), "llama3_json", "none"),
        ('<|python_tag|>{"parameters": {}}', kind("llama4"), "llama4_json", "none"),
        ("<|python_start|>[func_name1(a=1)]", kind("llama4"), "llama4_pythonic", "none"),
        ("<|start_header_id|>[func_name1(a=1)]", kind("llama"), "pythonic", "none"),
        ('<|start_header_id|><TOOLCALL>"parameters"', kind("llama"), "none", "none"),
        ("<|action_start|><|plugin|>", {}, "internlm", "none"),
        ("a function call{{ '<|role_sep|>' }}", {}, "gigachat3", "none"),
        ("<|function_call|>", {}, "gigachat3", "none"),
        ("<|tools_prefix|>", kind("apertus"), "apertus", "none"),
        ("<steptml:invoke><think>", kind("step3_text"), "step3", "step3"),
        ("<longcat_tool_call>", {}, "longcat", "none"),
        ("<dots_function_call>", {}, "dots", "none"),
        ("<function name='a'><param name='b'>", kind("minicpm"), "minicpm5", "none"),
        ("<|content_thinking|><|content_invoke_tool_json|>", {}, "inkling", "inkling"),
        ("<ifm|think><ifm|tool_call>", {}, "k2_horizon", "k2_horizon"),
        ("to=self<|message|><atem:invoke", {}, "muse_glimmer", "muse_glimmer"),
        (
            "<|plamo:begin_think:plamo|><|plamo:begin_tool_request:plamo|>",
            {},
            "plamo3",
            "plamo3",
        ),
    ],
)
def test_guess_follows_markers_and_model_type(
    template: str, config: dict[str, Any], tool: str, reasoning: str
) -> None:
    assert guess(template, config) == ParserNames(tool=tool, reasoning=reasoning)


def test_guess_reads_type_of_inner_model() -> None:
    """Models for images have the language model's type in `text_config`."""
    config = {"model_type": "other", "text_config": {"model_type": "ernie4_5"}}
    assert guess(HERMES, config).tool == "ernie45"


def test_every_rule_names_a_known_parser() -> None:
    tools = {rule.parser for rule in parser_rules._TOOLS} - {"none"}
    reasoning = {rule.parser for rule in parser_rules._REASONING}
    assert "none" not in reasoning
    assert tools <= TOOL_PARSERS and reasoning <= REASONING_PARSERS
    assert {*_TOOL_TOKENS} <= tools


def write_model(folder: Path, template: str, *tokens: str, **files: Any) -> Path:
    """Write a model of a template, and of a tokenizer with these tokens."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    added = [{"id": number, "content": token} for number, token in enumerate(tokens)]
    files = {"tokenizer": {"model": {"vocab": {"a": 0}}, "added_tokens": added}} | files
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_settings_replace_guesses(tmp_path: Path) -> None:
    folder = write_model(tmp_path, HERMES + CLOSES, config=kind("qwen3"))
    assert resolve("auto", "auto", folder) == ParserNames(tool="hermes", reasoning="qwen3")
    assert resolve("none", "auto", folder) == ParserNames(tool="none", reasoning="qwen3")
    assert resolve("qwen3_json", "none", folder) == ParserNames(tool="qwen3_json", reasoning="none")
    assert resolve("none", "none", tmp_path / "none") == ParserNames(tool="none", reasoning="none")


def test_guess_needs_tokens_of_parser(tmp_path: Path) -> None:
    """Without them, vLLM could not make the parser, and the worker would not start."""
    template = "<|tool_call_start|>[]<|tool_call_end|>"
    assert resolve("auto", "auto", write_model(tmp_path, template)).tool == "none"
    write_model(tmp_path, template, "<|tool_call_start|>", "<|tool_call_end|>")
    assert resolve("auto", "auto", tmp_path).tool == "lfm2"
    pairs = {"model": {"vocab": [["<|tool_call_start|>", 0.0], ["<|tool_call_end|>", -1.0]]}}
    write_model(tmp_path, template, tokenizer=pairs)
    assert resolve("auto", "auto", tmp_path).tool == "lfm2"


def test_own_rules_of_model_are_used_where_no_parser_is_known(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"thinking": {}, "content": {}, "tool_calls": {}}
    config = {"response_template": {"fields": fields}}
    folder = write_model(tmp_path, "{{ messages }}", tokenizer_config=config)
    assert resolve("auto", "auto", folder) == ParserNames(tool="hf", reasoning="hf")
    assert resolve("auto", "none", folder) == ParserNames(tool="hf", reasoning="none")
    write_model(folder, HERMES, tokenizer_config=config)
    assert resolve("auto", "auto", folder) == ParserNames(tool="hermes", reasoning="none")
    assert resolve("hf", "auto", folder) == ParserNames(tool="hf", reasoning="hf")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    expected = r"model\.tool_parser: expected 'auto', 'none' or one of vLLM's: apertus, .*xlam; "
    with pytest.raises(ConfigError, match=expected + "found 'herms'"):
        resolve("herms", "auto", tmp_path)
    expected = r"model\.reasoning_parser: expected .* cohere_command3, .*step3p5; found 'hermes'"
    with pytest.raises(ConfigError, match=expected):
        resolve("auto", "hermes", tmp_path)
    with pytest.raises(
        ConfigError, match="expected 'hf' alone or for both, found 'hf' and 'qwen3'"
    ):
        resolve("hf", "qwen3", tmp_path)


def test_simulated_model_has_no_parsers() -> None:
    """An import of vLLM would make the start of each simulated worker slow."""
    model = ModelSettings(path=model_folder(ModelSettings(path="sim")))
    assert parsers_of(model) == ParserNames()


@pytest.mark.vllm
@pytest.mark.timeout(1_800)  # imports vLLM
def test_names_are_those_of_vllm() -> None:
    tools = import_module("vllm.tool_parsers").ToolParserManager
    reasoning = import_module("vllm.reasoning").ReasoningParserManager
    assert frozenset(tools.lazy_parsers) == TOOL_PARSERS
    assert frozenset(reasoning.lazy_parsers) == REASONING_PARSERS


@pytest.mark.vllm
@pytest.mark.timeout(1_800)  # imports every parser
def test_parsers_without_needed_tokens_are_made_for_any_tokenizer() -> None:
    """So no guess stops a worker: the others are guessed only where their tokens are."""
    folder = model_folder(ModelSettings(path="tiny"))
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(folder)
    manager = import_module("vllm.parser").ParserManager
    tools = {rule.parser for rule in parser_rules._TOOLS} - {"none", "hy_v3", "hy_v4"}
    refused = {name for name in tools if not is_made(manager, tokenizer, tool_parser_name=name)}
    assert refused == {*_TOOL_TOKENS}
    reasoning = {rule.parser for rule in parser_rules._REASONING} - {"hy_v3", "hy_v4"}
    refused = {
        name
        for name in {*reasoning, "deepseek_r1", "olmo3", "qwen3"}
        if not is_made(manager, tokenizer, reasoning_parser_name=name)
    }
    assert refused == {*_REASONING_TOKENS} - {"deepseek_v3"}  # which needs them by the request


def is_made(manager: Any, tokenizer: Any, **names: str) -> bool:
    """Return whether vLLM makes the parser for this tokenizer."""
    try:
        manager.get_parser(enable_auto_tools=True, tokenizer=tokenizer, **names)
    except TypeError:
        return False
    return True
