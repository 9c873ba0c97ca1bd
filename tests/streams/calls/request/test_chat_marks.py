"""What in a chat may be a control token: what templates write, roles, and marks of answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from schemas.errors import InvalidRequest
from schemas.model.control_tokens import MARK
from streams.calls.request.chat import Chat
from streams.calls.request.tokenizer import Tokenizer
from tests.streams.gateway.small_tokenizer import tokenizer_folder

THINKING = (
    "{% for m in messages %}<|user|>{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
    "{% if think %}<tool_call></think>{% endif %}"
)


def loaded(folder: Path, template: str) -> Tokenizer:
    raw = RawTokenizer.from_file(str(tokenizer_folder() / "tokenizer.json"))
    raw.add_tokens([AddedToken(name) for name in ("</think>", "<tool_call>", "<b>", "user", "|")])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Tokenizer(folder)


def control_names(tokenizer: Tokenizer, *messages: dict[str, Any]) -> list[str | None]:
    ids = tokenizer.encoder.ids(tokenizer.pieces(Chat(messages=messages)))
    return [tokenizer.token_text(token) for token in ids if token in tokenizer.control.ids]


def message_from(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_chat_marks_keep_strings_that_template_searches(tmp_path: Path) -> None:
    """Without `</think>` intact, the reasoning of a model would stay in the prompt."""
    model_tokenizer = loaded(tmp_path, THINKING)
    answer = message_from("assistant", "hm</think>yes")
    assert "".join(model_tokenizer.pieces(Chat(messages=[answer]))) == "<|user|>yes</s>"
    spelled = "</think><tool_call><b></s>"
    for role in ("user", "tool", "assistant"):
        assert control_names(model_tokenizer, message_from(role, spelled)) == ["<|user|>", "</s>"]


def test_chat_marks_make_strings_written_by_template_plain_text(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ ('<tool_call>' + m.content) | trim }}{% endfor %}"
    model_tokenizer = loaded(tmp_path, template)
    assert control_names(model_tokenizer, message_from("assistant", "<tool_call>")) == [
        "<tool_call>"
    ]


def test_chat_marks_leave_other_tokens_to_tokenizer(tmp_path: Path) -> None:
    """`<b>` is a token of some models; a word stays one, though a template writes it."""
    model_tokenizer = loaded(tmp_path, THINKING)
    text = "a <b> c user |"
    pieces = model_tokenizer.pieces(Chat(messages=[message_from("user", text)]))
    assert pieces == [f"<|user|>{text}</s>"]


COMPOSING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def test_chat_marks_allow_role_tokens_but_no_end_token(
    tmp_path: Path,
) -> None:
    model_tokenizer = loaded(tmp_path, COMPOSING)
    assert control_names(model_tokenizer, message_from("s", "s")) == ["<s>", "</s>"]
    assert control_names(model_tokenizer, message_from("/s", "/s")) == ["</s>"]
    assert control_names(model_tokenizer, message_from("</s>", "x")) == ["</s>"]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    assert control_names(Tokenizer(tmp_path), message_from("s", "x")) == ["</s>"]


def test_chat_marks_keep_strings_that_template_compares(tmp_path: Path) -> None:
    """A token's name ends with the string's first letter."""
    template = "{% for m in messages %}{{ 'yes' if m.role == 'user' else m.role }}{% endfor %}"
    raw = RawTokenizer.from_file(str(tokenizer_folder() / "tokenizer.json"))
    raw.add_special_tokens(["zho_Hu", "user_"])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(template)
    assert Tokenizer(tmp_path).pieces(Chat(messages=[message_from("user", "")])) == ["yes"]


def test_chat_marks_survive_template_filters(tmp_path: Path) -> None:
    """ASCII escapes of `tojson` must not keep the marks from removal."""
    template = "{{ messages[0] | tojson(ensure_ascii=true) | upper }}"
    message = message_from("user", "a </s> <tool_call> <|us")
    pieces = loaded(tmp_path, template).pieces(Chat(messages=[message]))
    assert "".join(pieces) == json.dumps(message).upper()


def test_template_error_shows_no_marks(tmp_path: Path) -> None:
    model_tokenizer = loaded(tmp_path, "{{ raise_exception('no ' + messages[0].content) }}")
    with pytest.raises(InvalidRequest, match="refuses them: no <s></s>") as refused:
        model_tokenizer.pieces(Chat(messages=[message_from("user", "<s></s>")]))
    assert MARK not in refused.value.message
