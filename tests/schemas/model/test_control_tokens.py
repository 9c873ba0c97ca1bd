"""No text from outside becomes a control token, whatever stands around it."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.model.control_tokens import MARK, ControlTokens
from schemas.model.files import control_tokens_of
from schemas.settings import ModelSettings
from streams.calls.request.tokenizer import Encoder
from tests.schemas.model.steered_models import KINDS, steered
from workers.embed.embedders.served_tokens import ServedTokens

SIGNS = ("<", "|", ">", "/", "[", "]", " ", "\n", "s", "im", "_end", "a", "x1", "\u00e9", "\0", "")


@cache
def loaded(kind: str) -> tuple[Encoder, ControlTokens, ServedTokens]:
    model = steered(kind)
    encoder = Encoder(model.folder / "tokenizer.json")
    served = ServedTokens(ModelSettings(path=str(model.folder), name="m"))
    return encoder, control_tokens_of(model.folder, encoder.raw), served


def parts_of(names: Sequence[str]) -> st.SearchStrategy[str]:
    """Sample pieces of names, whole names, and their surroundings, in either case."""
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
def test_only_names_written_by_template_become_control_tokens(
    kind: str, data: st.DataObject
) -> None:
    """Outside texts add no control tokens to those of the template's own parts."""
    encoder, control, served = loaded(kind)
    names = steered(kind).names
    assert control.names.issuperset(names)
    outside = data.draw(st.lists(parts_of(names), min_size=1, max_size=4))
    templates = [data.draw(st.sampled_from([*names, *SIGNS])) for _ in outside]
    text = "".join(
        template + control.mark(outside_text)
        for template, outside_text in zip(templates, outside, strict=True)
    )
    pieces = control.pieces(text)
    assert "".join(pieces) == text.replace(MARK, "")
    expected = [
        token for template in templates for token in encoder.ids([template]) if token in control.ids
    ]
    for ids in (encoder.ids(pieces), encoder._plain(pieces, False)):
        assert [token for token in ids if token in control.ids] == expected
    for outside_text in outside:
        assert control.ids.isdisjoint(served.ids(outside_text))


@pytest.mark.parametrize("kind", KINDS.values())
@given(data=st.data())
def test_texts_without_names_keep_their_tokens(kind: str, data: st.DataObject) -> None:
    """Marks leave no trace where no control token's name can form."""
    encoder, control, served = loaded(kind)
    text = data.draw(st.text(st.sampled_from("ab <>|[]/\n1.,"), max_size=40))
    end = steered(kind).end
    assert encoder.ids(control.pieces(control.mark(text) + end)) == encoder.ids([text + end])
    assert served.ids(text) == list(encoder.ids([text]))


@pytest.mark.parametrize(
    "kind",
    [KINDS[name] for name in KINDS if name not in ("part of the vocabulary", "words in pieces")],
)
def test_spelled_out_names_decode_to_same_text(kind: str) -> None:
    model, (encoder, _, served) = steered(kind), loaded(kind)
    for name in model.names:
        ids = served.ids(f"a{name} b")
        assert encoder.raw.decode(ids, skip_special_tokens=False) == f"a{name} b"


def test_unknown_token_is_no_control_token_in_outside_text() -> None:
    _, control, served = loaded("part of the vocabulary")
    assert served.ids("\u4f60") and control.ids.isdisjoint(served.ids("\u4f60"))
    assert "<unk>" in control.names
