"""A frozen dataclass decorator that takes 0.1 ms."""

from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass, in 0.1 ms instead of 0.5 with dataclass(frozen=True).

    dataclass generates and compiles six methods for each class. This decorator has it generate only __init__; all
    classes
    share the others.
    """
    for name, method in SHARED.items():
        if name not in kind.__dict__:
            setattr(kind, name, method)
    return dataclass(eq=False, repr=False)(kind)


def get_values(instance: "DataclassInstance") -> tuple[object, ...]:
    return tuple(getattr(instance, each.name) for each in fields(instance))


def is_equal(instance: "DataclassInstance", other: "DataclassInstance") -> object:
    return get_values(instance) == get_values(other) if other.__class__ is instance.__class__ else NotImplemented


def compute_hash(instance: "DataclassInstance") -> int:
    return hash(get_values(instance))


def format_repr(instance: "DataclassInstance") -> str:
    arguments = (f"{each.name}={getattr(instance, each.name)!r}" for each in fields(instance) if each.repr)
    return f"{type(instance).__qualname__}({', '.join(arguments)})"


def set_once(instance: "DataclassInstance", name: str, value: object) -> None:
    """Set a field that has no value yet. Raises FrozenInstanceError for any other name."""
    if name in instance.__dict__ or name not in instance.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(instance, name, value)


def refuse_deletion(instance: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


SHARED = {
    "__eq__": is_equal, "__hash__": compute_hash, "__repr__": format_repr, "__setattr__": set_once,
    "__delattr__": refuse_deletion,
}  # fmt: skip
