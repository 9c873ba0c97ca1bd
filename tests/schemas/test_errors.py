"""The error tree: what the docstring draws, what travels, and what a gateway answers."""

import re
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import errors
from schemas.codec import Codec
from schemas.errors import BY_CODE, FaultSource, InvalidRequest, TriviumError, WorkerLost, from_wire
from schemas.records import WireError

CLASSES = sorted(BY_CODE.values(), key=lambda cls: cls.__name__)
DRAWN = re.compile(r"^([│├└─ ]*)([A-Z]\w+)(?: +(\d{3}) (\w+))?", re.MULTILINE)


def docstring_tree() -> dict[str, tuple[str, str, str]]:
    """Return class name to parent, status and code, as the docstring draws them."""
    classes: dict[str, tuple[str, str, str]] = {}
    path: dict[int, str] = {}
    tree = (errors.__doc__ or "").split("\n\n")[1]
    for indent, name, status, code in DRAWN.findall(tree):
        depth = len(indent) // 4
        path[depth] = name
        classes[name] = (path[depth - 1] if depth else "Exception", status, code)
    return classes


def test_errors_docstring_draws_every_class() -> None:
    assert set(docstring_tree()) == {cls.__name__ for cls in CLASSES}, (
        "draw it in schemas/errors.py"
    )


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_errors_docstring_states_parent_status_and_code(cls: type[TriviumError]) -> None:
    parent, status, code = docstring_tree()[cls.__name__]
    assert cls.__base__ is not None and cls.__base__.__name__ == parent
    if status:
        assert (str(cls.http_status), cls.code) == (status, code)
    else:
        assert cls.__subclasses__(), f"{cls.__name__} is a leaf and needs a status and a code"


def test_error_codes_are_unique() -> None:
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type)]
    ours = [cls for cls in classes if issubclass(cls, TriviumError)]
    assert len({cls.code for cls in ours}) == len(ours) == len(BY_CODE)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_error_attributes_are_consistent(cls: type[TriviumError]) -> None:
    assert 400 <= cls.http_status < 600
    assert (cls.fault is FaultSource.CLIENT) <= (not cls.retriable and cls.http_status < 500)
    assert (cls.fault in (FaultSource.OVERLOAD, FaultSource.WORKER)) <= cls.retriable
    assert cls.http_status == 499 or HTTPStatus(cls.http_status)
    assert cls.__doc__


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_errors_survive_wire_round_trip(cls: type[TriviumError]) -> None:
    error = cls("request r1: expected a, found b")
    error_copy = from_wire(Codec().decode(Codec().encode(error.to_wire())))
    assert type(error_copy) is cls
    assert (error_copy.message, str(error_copy)) == (error.message, error.message)


def test_wire_error_escapes_invalid_utf8_in_message() -> None:
    wire = InvalidRequest("expected a field, found \ud800é").to_wire()
    assert Codec().decode(Codec().encode(wire)).message == "expected a field, found \\ud800é"


def test_from_wire_maps_unknown_code_to_base_class() -> None:
    error = from_wire(WireError(code="from_the_future", message="m", retriable=True))
    assert type(error) is TriviumError and error.message == "m"


@given(st.text())
def test_from_wire_takes_any_code(code: str) -> None:
    assert isinstance(from_wire(WireError(code=code, message="m")), TriviumError)


def test_invalid_request_names_its_parameter() -> None:
    assert InvalidRequest("top_p: expected (0, 1], found 2", param="top_p").param == "top_p"
    assert InvalidRequest("body: expected JSON").param is None


def test_wire_error_carries_code_and_retriable_of_class() -> None:
    wire = WorkerLost("worker w1 fell silent").to_wire()
    assert wire == WireError(code="worker_lost", message="worker w1 fell silent", retriable=True)
