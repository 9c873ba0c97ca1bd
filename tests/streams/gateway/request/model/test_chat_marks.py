"""What in a chat may be a control token: what templates write, roles, and marks of answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from schemas.errors import InvalidRequest
from schemas.model.control_tokens import MARK
from streams.gateway.request.tokenizer import Chat, Tokenizer
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


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_an_answer_keeps_what_the_template_looks_for_in_it(tmp_path: Path) -> None:
    """Cut, `</think>` was not found, and what a model had thought stayed in the prompt."""
    one = loaded(tmp_path, THINKING)
    answer = said("assistant", "hm</think>yes")
    assert "".join(one.pieces(Chat(messages=[answer]))) == "<|user|>yes</s>"
    spelled = "</think><tool_call><b></s>"
    for role in ("user", "tool", "assistant"):
        assert control_names(one, said(role, spelled)) == ["<|user|>", "</s>"]


def test_what_the_template_only_writes_is_text_in_an_answer(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ ('<tool_call>' + m.content) | trim }}{% endfor %}"
    one = loaded(tmp_path, template)
    assert control_names(one, said("assistant", "<tool_call>")) == ["<tool_call>"]


def test_what_no_template_writes_is_as_the_tokenizer_has_it(tmp_path: Path) -> None:
    """Gemma's `<b>` is a token of web pages; a word is a word, though a template writes it."""
    one = loaded(tmp_path, THINKING)
    text = "a <b> c user |"
    pieces = one.pieces(Chat(messages=[said("user", text)]))
    assert pieces == [f"<|user|>{text}</s>"]


COMPOSING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def test_a_role_is_a_token_where_the_template_makes_it_one_but_none_that_ends(
    tmp_path: Path,
) -> None:
    one = loaded(tmp_path, COMPOSING)
    assert control_names(one, said("s", "s")) == ["<s>", "</s>"]
    assert control_names(one, said("/s", "/s")) == ["</s>"]
    assert control_names(one, said("</s>", "x")) == ["</s>"]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    assert control_names(Tokenizer(tmp_path), said("s", "x")) == ["</s>"]


def test_what_the_template_compares_with_stays_whole(tmp_path: Path) -> None:
    """Though a name ends with a letter of it."""
    template = "{% for m in messages %}{{ 'yes' if m.role == 'user' else m.role }}{% endfor %}"
    raw = RawTokenizer.from_file(str(tokenizer_folder() / "tokenizer.json"))
    raw.add_special_tokens(["zho_Hu", "user_"])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(template)
    assert Tokenizer(tmp_path).pieces(Chat(messages=[said("user", "")])) == ["yes"]


def test_marks_leave_no_trace_in_what_a_filter_makes(tmp_path: Path) -> None:
    """They were no ASCII, so a filter wrote them as escapes, which nothing took away."""
    template = "{{ messages[0] | tojson(ensure_ascii=true) | upper }}"
    message = said("user", "a </s> <tool_call> <|us")
    pieces = loaded(tmp_path, template).pieces(Chat(messages=[message]))
    assert "".join(pieces) == json.dumps(message).upper()


def test_a_template_that_refuses_shows_no_marks(tmp_path: Path) -> None:
    one = loaded(tmp_path, "{{ raise_exception('no ' + messages[0].content) }}")
    with pytest.raises(InvalidRequest, match="refuses them: no <s></s>") as refused:
        one.pieces(Chat(messages=[said("user", "<s></s>")]))
    assert MARK not in refused.value.message
