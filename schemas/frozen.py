"""`@frozen`: dataclasses that are frozen, slotted and keyword-only, and cheap to make.

Theory of operation. The constructor of a frozen dataclass sets each field by a call of
`object.__setattr__`, which for records of twenty fields costs more than most decisions about them.
Here an object is of another class while it is constructed, with the same slots but not frozen, so
that fields are set by plain assignments; then it gets its own class. Python allows that between
classes of equal layout. Everything else is `dataclasses`'. `@quickly_made` gives that constructor
to a dataclass that is there already, such as one with a base.

A call of a class gathers its arguments into a dictionary first, a call of a function does not:
`maker` gives a class's constructor as a function, for records of which a decision makes many.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ParamSpec, TypeVar, dataclass_transform

P = ParamSpec("P")
T = TypeVar("T")
_MAKERS: dict[Any, Any] = {}  # by class

# A base's are those of frozen classes.
_PLAIN = {name: getattr(object, name) for name in ("__init__", "__setattr__", "__delattr__")}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Class decorator, as `dataclass(frozen=True, slots=True, kw_only=True)`; not for subclasses or
    classes with a `__post_init__`."""
    return quickly_made(dataclass(frozen=True, slots=True, kw_only=True)(cls))


def quickly_made(cls: type[T]) -> type[T]:
    """Class decorator for frozen, slotted, keyword-only dataclasses without a `__post_init__`."""
    constructors = _constructors(cls)
    cls.__init__ = constructors["__init__"]  # type: ignore[method-assign]  # the same, only faster
    _MAKERS[cls] = constructors["make"]
    return cls


def maker(cls: Callable[P, T]) -> Callable[P, T]:
    """What makes objects of a frozen class in half of the time that the class takes."""
    found: Callable[P, T] = _MAKERS[cls]
    return found


def _constructors(cls: Any) -> dict[str, Any]:
    """`__init__` and `make` for the class, written out and compiled as `dataclasses` does."""
    scope: dict[str, Any] = {
        "_become": vars(object)["__class__"].__set__,
        "_Open": type(cls.__name__, cls.__bases__, {"__slots__": cls.__slots__, **_PLAIN}),
        "_Frozen": cls,
        "_MISSING": MISSING,
    }
    parameters, lines = [], []
    for each in fields(cls):
        name = value = each.name
        if each.default_factory is not MISSING:
            scope[f"_make_{name}"] = each.default_factory
            parameters.append(f"{name}=_MISSING")
            value = f"_make_{name}() if {name} is _MISSING else {name}"
        elif each.default is not MISSING:
            scope[f"_default_{name}"] = each.default
            parameters.append(f"{name}=_default_{name}")
        else:
            parameters.append(name)
        lines.append(f"self.{name} = {value}")
    lines.append("self.__class__ = _Frozen")
    names = ", ".join(parameters)
    texts = (
        [f"def __init__(self, *, {names}):", "_become(self, _Open)", *lines],
        [f"def make(*, {names}):", "self = _Open()", *lines, "return self"],
    )
    for text in texts:
        exec("\n    ".join(text), scope)
    scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    scope["make"].__qualname__ = cls.__qualname__
    return scope
