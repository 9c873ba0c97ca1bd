"""No text from outside becomes a control token, whatever stands around it."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.model.control_tokens import MARK, ControlTokens
from schemas.model.files import control_tokens_of
from schemas.settings import ModelSettings
from streams.gateway.request.model.encoder import Encoder
from tests.schemas.model.steered import KINDS, steered
from workers.embed.embedders.served_tokens import ServedTokens

SIGNS = ("<", "|", ">", "/", "[", "]", " ", "\n", "s", "im", "_end", "a", "x1", "\u00e9", "\0", "")


@cache
def loaded(kind: str) -> tuple[Encoder, ControlTokens, ServedTokens]:
    model = steered(kind)
    encoder = Encoder(model.folder / "tokenizer.json")
    served = ServedTokens(ModelSettings(path=str(model.folder), name="m"))
    return encoder, control_tokens_of(model.folder, encoder.raw), served


def parts_of(names: Sequence[str]) -> st.SearchStrategy[str]:
    """Pieces of names, whole ones, and what may stand around them, in either case."""
    name = st.sampled_from(names)
    piece = st.builds(
        lambda name, begin, end: name[begin % len(name) :][: end or None],
        name,
        st.integers(0, 20),
        st.integers(0, 20),
    )
    part = st.one_of(st.sampled_from(SIGNS), name, piece, name.map(str.upper), name.map(str.lower))
    return st.lists(part, max_size=6).map("".join)


@pytest.mark.parametrize("kind", KINDS.values())
@given(data=st.data())
def test_only_what_the_template_writes_whole_is_a_control_token(
    kind: str, data: st.DataObject
) -> None:
    """Between texts from outside stand names and pieces of names that a template writes. Control
    tokens are those that the template's texts have without anything from outside."""
    encoder, control, served = loaded(kind)
    names = steered(kind).names
    assert control.names.issuperset(names)
    outside = data.draw(st.lists(parts_of(names), min_size=1, max_size=4))
    templates = [data.draw(st.sampled_from([*names, *SIGNS])) for _ in outside]
    text = "".join(own + control.mark(said) for own, said in zip(templates, outside, strict=True))
    pieces = control.pieces(text)
    assert "".join(pieces) == text.replace(MARK, "")
    expected = [token for own in templates for token in encoder.ids([own]) if token in control.ids]
    for ids in (encoder.ids(pieces), encoder._plain(pieces, False)):
        assert [token for token in ids if token in control.ids] == expected
    for said in outside:
        assert control.ids.isdisjoint(served.ids(said))


@pytest.mark.parametrize("kind", KINDS.values())
@given(data=st.data())
def test_other_texts_have_the_tokens_that_they_have_anywhere(
    kind: str, data: st.DataObject
) -> None:
    """Marks go without a trace where no name comes about."""
    encoder, control, served = loaded(kind)
    said = data.draw(st.text(st.sampled_from("ab <>|[]/\n1.,"), max_size=40))
    end = steered(kind).end
    assert encoder.ids(control.pieces(control.mark(said) + end)) == encoder.ids([said + end])
    assert served.ids(said) == list(encoder.ids([said]))


@pytest.mark.parametrize(
    "kind",
    [KINDS[name] for name in KINDS if name not in ("part of the vocabulary", "words in pieces")],
)
def test_what_is_spelled_stays_readable(kind: str) -> None:
    model, (encoder, _, served) = steered(kind), loaded(kind)
    for name in model.names:
        ids = served.ids(f"a{name} b")
        assert encoder.raw.decode(ids, skip_special_tokens=False) == f"a{name} b"


def test_a_token_that_stands_for_what_is_unknown_steers_nothing() -> None:
    _, control, served = loaded("part of the vocabulary")
    assert served.ids("\u4f60") and control.ids.isdisjoint(served.ids("\u4f60"))
    assert "<unk>" in control.names
