"""Frozen records: what `dataclasses` promises of them, however they are constructed."""

import pickle
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace

import pytest

from schemas.frozen import frozen, maker, quickly_made


@frozen
class Parcel:
    """Of each kind of field one."""

    name: str
    grams: int = 5
    stamps: Sequence[str] = ()
    notes: dict[str, str] = field(default_factory=dict)


def test_constructs_with_defaults() -> None:
    parcel = Parcel(name="a", stamps=("x",))
    assert asdict(parcel) == {"name": "a", "grams": 5, "stamps": ("x",), "notes": {}}
    assert type(parcel) is Parcel
    assert parcel.notes is not Parcel(name="a").notes
    assert Parcel(name="a", notes={"k": "v"}).notes == {"k": "v"}
    assert repr(parcel) == "Parcel(name='a', grams=5, stamps=('x',), notes={})"


def test_a_maker_makes_the_same() -> None:
    make = maker(Parcel)
    parcel = make(name="a", stamps=("x",))
    assert parcel == Parcel(name="a", stamps=("x",)) and type(parcel) is Parcel
    assert parcel.notes is not make(name="a").notes
    with pytest.raises(FrozenInstanceError):
        parcel.grams = 6  # type: ignore[misc]  # what the test is about
    with pytest.raises(TypeError, match="missing 1 required .* 'name'"):
        make()  # type: ignore[call-arg]  # what the test is about


def test_is_frozen_and_slotted() -> None:
    parcel = Parcel(name="a")
    with pytest.raises(FrozenInstanceError):
        parcel.grams = 6  # type: ignore[misc]  # what the test is about
    with pytest.raises(FrozenInstanceError):
        del parcel.grams
    assert not hasattr(parcel, "__dict__")


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"Parcel.__init__\(\) missing 1 required .* 'name'"):
        Parcel()  # type: ignore[call-arg]  # what the test is about
    with pytest.raises(TypeError, match="unexpected keyword argument 'weight'"):
        Parcel(name="a", weight=1)  # type: ignore[call-arg]  # what the test is about
    with pytest.raises(TypeError, match="positional"):
        Parcel("a")  # type: ignore[call-arg]  # what the test is about


def test_equal_fields_make_equal_parcels() -> None:
    parcel = Parcel(name="a", grams=6)
    assert parcel == Parcel(name="a", grams=6) != replace(parcel, grams=7)
    assert pickle.loads(pickle.dumps(parcel)) == parcel
    assert len({Plain(at=1), Plain(at=1), Plain(at=2)}) == 2


@frozen
class Plain:
    """Hashable, as its fields are."""

    at: int


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True)
class Registered(Parcel):
    """With a base."""

    number: int
    signed: bool = False


def test_dataclasses_with_a_base_are_made_quickly_too() -> None:
    parcel = Registered(name="a", number=7)
    assert asdict(parcel) == {
        "name": "a", "grams": 5, "stamps": (), "notes": {}, "number": 7, "signed": False
    }  # fmt: skip
    assert type(parcel) is Registered
    assert parcel == Registered(name="a", number=7) == maker(Registered)(name="a", number=7)
    assert parcel != Parcel(name="a")
    assert replace(parcel, signed=True).signed
    for name in ("grams", "signed"):
        with pytest.raises(FrozenInstanceError):
            setattr(parcel, name, 1)
        with pytest.raises(FrozenInstanceError):
            delattr(parcel, name)
    assert not hasattr(parcel, "__dict__")
