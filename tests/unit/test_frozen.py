"""Test that frozen classes behave as those of dataclass(frozen=True)."""

from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar

import pytest

from localllm.frozen import frozen


def make_classes(decorator):
    @decorator
    class One:
        """A docstring."""

        kind: ClassVar[str] = "one"
        a: int
        b: tuple[int, ...] = ()
        c: dict[str, int] = field(default_factory=dict, repr=False)

        @cached_property
        def double(self) -> int:
            return 2 * self.a

    @decorator
    class Two(One):
        d: float = 1.5

        def __post_init__(self) -> None:
            object.__setattr__(self, "d", self.d + 1)

    return One, Two


@pytest.mark.parametrize("place", [0, 1])
def test_frozen_classes_equal_dataclasses(place: int):
    ours, theirs = (make_classes(decorator)[place] for decorator in (frozen, dataclass(frozen=True)))
    for arguments in ((1,), (1, (2, 3)), (4, (), {"x": 1})):
        one, other = ours(*arguments), theirs(*arguments)
        assert repr(one).partition("(")[2] == repr(other).partition("(")[2] and vars(one) == vars(other)
        assert one == ours(*arguments) and one.double == other.double and one == ours(*arguments)
        assert one != ours(9) and one not in (other, arguments)
    assert [each.name for each in fields(ours)] == [each.name for each in fields(theirs)]
    assert replace(ours(1), a=5).a == 5
    with pytest.raises(TypeError, match="unhashable"):
        hash(ours(1))
    with pytest.raises(TypeError):
        ours()


def test_equal_instances_are_one_key():
    @frozen
    class Key:
        a: int
        b: str = "b"

    assert {Key(1): 2}[Key(1, "b")] == 2 and Key(1) not in {Key(2)}


@pytest.mark.parametrize("name", ["a", "c", "none"])
def test_assignment_and_deletion_raise(name: str):
    one = make_classes(frozen)[1](1)
    with pytest.raises(FrozenInstanceError, match=name):
        setattr(one, name, 2)
    with pytest.raises(FrozenInstanceError, match=name):
        delattr(one, name)


def test_own_methods_are_kept():
    @frozen
    class Named:
        name: str

        def __repr__(self) -> str:
            return self.name

    assert repr(Named("x")) == "x"
