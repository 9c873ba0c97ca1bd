"""`@frozen`: dataclasses that are frozen, slotted and keyword-only, and cheap to make.

Theory of operation. The constructor of a frozen dataclass sets each field by a call of
`object.__setattr__`, which for records of twenty fields costs more than most decisions about them.
Here an object is of another class while it is constructed, with the same slots but not frozen, so
that fields are set by plain assignments; then it gets its own class. Python allows that between
classes of equal layout. Everything else is `dataclasses`'. `@quickly_made` gives that constructor
to a dataclass that is there already, such as one with a base.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")

# A base's are those of frozen classes.
_PLAIN = {"__setattr__": object.__setattr__, "__delattr__": object.__delattr__}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Class decorator, as `dataclass(frozen=True, slots=True, kw_only=True)`; not for subclasses or
    classes with a `__post_init__`."""
    return quickly_made(dataclass(frozen=True, slots=True, kw_only=True)(cls))


def quickly_made(cls: type[T]) -> type[T]:
    """Class decorator for frozen, slotted, keyword-only dataclasses without a `__post_init__`."""
    cls.__init__ = _constructor(cls)  # type: ignore[method-assign]  # the same, only faster
    return cls


def _constructor(cls: Any) -> Any:
    """An `__init__` for the class, written out and compiled as `dataclasses` does."""
    scope: dict[str, Any] = {
        "_become": vars(object)["__class__"].__set__,
        "_Open": type(cls.__name__, cls.__bases__, {"__slots__": cls.__slots__, **_PLAIN}),
        "_Frozen": cls,
        "_MISSING": MISSING,
    }
    parameters, lines = [], ["_become(self, _Open)"]
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
    head = f"def __init__(self, *, {', '.join(parameters)}):"
    exec("\n    ".join([head, *lines, "self.__class__ = _Frozen"]), scope)
    scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    return scope["__init__"]
