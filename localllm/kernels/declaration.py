"""The arguments of a kernel as named places of an array, see localllm.kernels.arguments."""

from typing import Any, ClassVar


class Declaration(tuple[int, ...]):
    """Places by name; Numba sees it as a named tuple; making named tuples of all declarations would take 4 ms.

    Attributes:
        _fields: the names.
    """

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]] = ()

    def _asdict(self) -> dict[str, int]:
        return dict(zip(self._fields, self, strict=True))


def arguments(names: str) -> Any:
    """Return a declaration: the names in the order of the array."""
    fields = tuple(names.split())
    places = {name: place for place, name in enumerate(fields)}
    return type("Arguments", (Declaration,), {"__slots__": (), "_fields": fields, **places})(places.values())
