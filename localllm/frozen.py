"""A frozen dataclass that is made in 0.1 ms."""

from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass in 0.1 ms of a start; dataclass(frozen=True) takes 0.5.

    dataclass generates and compiles six methods for each class. Here it generates only __init__; the others are shared
    by all classes.
    """
    for name, method in SHARED.items():
        if name not in kind.__dict__:
            setattr(kind, name, method)
    return dataclass(eq=False, repr=False)(kind)


def values(one: "DataclassInstance") -> tuple[object, ...]:
    return tuple(getattr(one, each.name) for each in fields(one))


def is_equal(one: "DataclassInstance", other: "DataclassInstance") -> object:
    return values(one) == values(other) if other.__class__ is one.__class__ else NotImplemented


def hash_of(one: "DataclassInstance") -> int:
    return hash(values(one))


def repr_of(one: "DataclassInstance") -> str:
    arguments = (f"{each.name}={getattr(one, each.name)!r}" for each in fields(one) if each.repr)
    return f"{type(one).__qualname__}({', '.join(arguments)})"


def set_once(one: "DataclassInstance", name: str, value: object) -> None:
    """Set a field that has no value yet. Raises FrozenInstanceError for any other name."""
    if name in one.__dict__ or name not in one.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(one, name, value)


def refuse(one: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


SHARED = {
    "__eq__": is_equal, "__hash__": hash_of, "__repr__": repr_of, "__setattr__": set_once, "__delattr__": refuse,
}  # fmt: skip
