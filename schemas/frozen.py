"""Dataclasses that are frozen for the type checker only, so that they are cheap to create.

A constructor of a dataclass that Python itself freezes sets each field by a call of
`object.__setattr__`, which for a record of twenty fields costs more than most decisions about it.
So nothing prevents a change at run time; `make check` finds it.
"""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Decorate a class as a slotted, keyword-only dataclass with a hash of its fields."""
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen_in_order(cls: type[T]) -> type[T]:
    """Decorate a class likewise; its few, distinct fields may be positional arguments."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
