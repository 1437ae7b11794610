"""Declarations of kernel arguments, see localllm.kernels.arguments."""

from typing import Any, ClassVar


class Declaration(tuple[int, ...]):
    """The names of a kernel's arguments, each an attribute whose value is its index in the argument array.

    Numba treats it as a named tuple. Real named tuples for all declarations would take 4 ms to create.

    Attributes:
        _fields: the names, in order.
    """

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]] = ()

    def _asdict(self) -> dict[str, int]:
        """Return each name with its index."""
        return dict(zip(self._fields, self, strict=True))


def arguments(names: str) -> Any:
    """Declare a kernel's arguments.

    names: separated by spaces, in the order of the argument array.
    """
    fields = tuple(names.split())
    indices = {name: index for index, name in enumerate(fields)}
    return type("Arguments", (Declaration,), {"__slots__": (), "_fields": fields, **indices})(indices.values())
