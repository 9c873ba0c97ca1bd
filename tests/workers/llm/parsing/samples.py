"""Answers in the form that each of vLLM's parsers reads, all with the same call or reasoning."""

from typing import Final

NAME, ARGUMENTS = "get_weather", {"city": "Paris", "days": 3}
TOOL: Final = {
    "type": "function",
    "function": {
        "name": NAME,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_JSON = '{"city": "Paris", "days": 3}'
_CALL, _LIST = (
    f'"name": "{NAME}", "arguments": {_JSON}',
    f'[{{"name": "{NAME}", "arguments": {_JSON}}}]',
)
_PYTHON = f'{NAME}(city="Paris", days=3)'
_INVOKE = (
    f'<invoke name="{NAME}">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n'
)
_FUNCTION = (
    f"<function={NAME}>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n"
)
_PAIRS = (
    "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
)
_SPACE = "]<]minimax[>["


def _dsml(outer: str, space: str = "") -> str:
    tag = f"\uff5cDSML\uff5c{space}"
    return (
        f'<{tag}{outer}>\n<{tag}invoke name="{NAME}">\n'
        f'<{tag}parameter name="city" string="true">Paris</{tag}parameter>\n'
        f'<{tag}parameter name="days" string="false">3</{tag}parameter>\n'
        f"</{tag}invoke>\n</{tag}{outer}>"
    )


def _deepseek(call: str) -> str:
    parts = ("calls\u2581begin", "call\u2581begin", "call\u2581end", "calls\u2581end")
    first, second, third, fourth = (f"<\uff5ctool\u2581{part}\uff5c>" for part in parts)
    return f"{first}{second}{call}{third}{fourth}"


_SEP = "<\uff5ctool\u2581sep\uff5c>"
_GLM, _QWEN = f"<tool_call>{NAME}\n{_PAIRS}</tool_call>", f"<tool_call>\n{_FUNCTION}</tool_call>"
_HERMES = f"<tool_call>\n{{{_CALL}}}\n</tool_call>"
_LLAMA = f'<|python_tag|>{{"name": "{NAME}", "parameters": {_JSON}}}'
CALLS: Final = {
    "apertus": f'<|tools_prefix|>[{{"{NAME}": {_JSON}}}]<|tools_suffix|>',
    "deepseek_v3": _deepseek(f"function{_SEP}{NAME}\n```json\n{_JSON}\n```"),
    "deepseek_v31": _deepseek(f"{NAME}{_SEP}{_JSON}"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "dots": f"<dots_function_call>\n{_INVOKE}</dots_function_call>",
    "ernie45": _HERMES,
    "functiongemma": f"<start_function_call>call:{NAME}{{city:<escape>Paris<escape>,"
    "days:<escape>3<escape>}<end_function_call>",
    "gemma4": f'<|tool_call>call:{NAME}{{city:<|"|>Paris<|"|>,days:3}}<tool_call|>',
    "gigachat3": f"<|function_call|>{{{_CALL}}}",
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": f"<|tool_call|>{_LIST}",
    "granite-20b-fc": f"<function_call> {{{_CALL}}}",
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": f"<tool_calls>{_LIST}</tool_calls>",
    "hy_v3": f"<tool_calls><tool_call>{NAME}<tool_sep>\n{_PAIRS}</tool_call></tool_calls>",
    "hy_v4": "<tool_calls>" + _GLM.replace("\n", "") + "</tool_calls>",
    "inkling": f'<|content_invoke_tool_json|>{{"name": "{NAME}", "args": {_JSON}}}<|end_message|>',
    "internlm": f'<|action_start|><|plugin|>{{"name": "{NAME}", "parameters": {_JSON}}}'
    "<|action_end|>",
    "jamba": f"<tool_calls>{_LIST}</tool_calls>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>"
    + f"{NAME}\n{_PAIRS}".replace("arg_", "ifm|arg_")
    + "</ifm|tool_call></ifm|tool_calls>",
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0"
    f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": f'<|open|>tools<|sep|><|open|>call tool="{NAME}" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "lfm2": f"<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>",
    "ling3": _GLM,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": f"<|python_start|>[{_PYTHON}]<|python_end|>",
    "longcat": f"<longcat_tool_call>{{{_CALL}}}</longcat_tool_call>",
    "mimo": _QWEN.replace("\n", ""),
    "minicpm5": f'<function name="{NAME}"><param name="city">Paris</param>'
    '<param name="days">3</param></function>',
    "minimax_m2": f"<minimax:tool_call>\n{_INVOKE}</minimax:tool_call>",
    "minimax_m3": f'{_SPACE}<tool_call>\n{_SPACE}<invoke name="{NAME}">{_SPACE}<city>Paris'
    f"{_SPACE}</city>{_SPACE}<days>3{_SPACE}</days>{_SPACE}</invoke>\n{_SPACE}</tool_call>",
    "mistral": f"[TOOL_CALLS]{NAME}[ARGS]{_JSON}",
    "muse_glimmer": f"<|start|>assistant to=functions.{NAME}<|message|><atem:function_calls>\n"
    f'<atem:invoke name="{NAME}">\n<atem:parameter name="city">Paris</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>',
    "olmo3": f"<function_calls>{_PYTHON}</function_calls>",
    "phi4_mini_json": f"functools{_LIST}",
    "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
    f"<|plamo:begin_tool_name:plamo|>{NAME}<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    f"{_JSON}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
    "<|plamo:end_tool_requests:plamo|>",
    "poolside_v1": _GLM,
    "pythonic": f"[{_PYTHON}]",
    "qwen3_coder": _QWEN,
    "qwen3_json": _HERMES,
    "qwen3_xml": _QWEN,
    "seed_oss": f"<seed:tool_call>\n{_FUNCTION}</seed:tool_call>",
    "step3": "<\uff5ctool_calls_begin\uff5c><\uff5ctool_call_begin\uff5c>function"
    f'<\uff5ctool_sep\uff5c><steptml:invoke name="{NAME}"><steptml:parameter name="city">Paris'
    '</steptml:parameter><steptml:parameter name="days">3</steptml:parameter></steptml:invoke>'
    "<\uff5ctool_call_end\uff5c><\uff5ctool_calls_end\uff5c>",
    "step3p5": _QWEN,
    "xlam": _LIST,
}
# They need what is not here: a package of Cohere's, OpenAI's vocabulary, a model's own template.
UNTESTED_CALLS: Final = {"cohere_command3", "cohere_command4", "openai", "hf"}

REASONING_TEXT, CONTENT = "sum it up", "All fine."
_THINK, _THINK_OPEN = (
    f"<think>{REASONING_TEXT}</think>{CONTENT}",
    f"{REASONING_TEXT}</think>{CONTENT}",
)
REASONED: Final = {
    "gemma4": f"<|channel>thought\n{REASONING_TEXT}<channel|>{CONTENT}",
    "k2_horizon": f"<ifm|think>{REASONING_TEXT}</ifm|think>{CONTENT}",
    "kimi_k3": f"<|open|>think<|sep|>{REASONING_TEXT}<|close|>think<|sep|>"
    f"<|open|>response<|sep|>{CONTENT}<|close|>response<|sep|>",
    "minimax_m3": f"<mm:think>{REASONING_TEXT}</mm:think>{CONTENT}",
    "mistral": f"[THINK]{REASONING_TEXT}[/THINK]{CONTENT}",
    "muse_glimmer": f" to=self<|message|>{REASONING_TEXT}<|eom|>"
    f"<|start|>assistant to=user<|message|>{CONTENT}<|eot|>",
    "plamo3": f"<|plamo:begin_think:plamo|>{REASONING_TEXT}<|plamo:end_think:plamo|>{CONTENT}",
    "seed_oss": f"<seed:think>{REASONING_TEXT}</seed:think>{CONTENT}",
    "step3": _THINK_OPEN,
    **dict.fromkeys(
        "deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 glm45 glm47 "
        "granite_thinking_parser holo2 hy_v4 kimi_k2 ling3 mimo minicpmv minimax_m2 nemotron_v3 "
        "poolside_v1 qwen3 step3p5".split(),
        _THINK,
    ),
}
# Only compared with themselves: their form is another than that of a short sample.
UNREAD_REASONING: Final = dict.fromkeys(("granite", "hy_v3", "minimax_m2_append_think"), _THINK)
# They need tokens of their model's own vocabulary, or what `UNTESTED_CALLS` need.
UNTESTED_REASONING: Final = {
    "cohere_command3",
    "cohere_command4",
    "hf",
    "hunyuan_a13b",
    "inkling",
    "olmo3",
    "openai_gptoss",
}
