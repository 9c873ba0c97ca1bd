"""Dataclasses that the type checker keeps from being changed, cheap to make.

Where Python itself keeps them frozen, a constructor sets each field by a call of
`object.__setattr__`, which for a record of twenty fields costs more than most decisions about it.
So nothing stops a change at run time; `make check` finds it.
"""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Class decorator: slotted, keyword-only, with a hash of its fields."""
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen_in_order(cls: type[T]) -> type[T]:
    """Likewise, of few fields that nobody mixes up: they may be given in their order."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
