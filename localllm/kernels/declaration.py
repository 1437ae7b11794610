"""Rows of the table of kernels, and the functions that add them; see localllm.kernels.table.

This module does not import Numba.
"""

from typing import Any, ClassVar, NamedTuple


class ArgumentIndices(tuple[int, ...]):
    """The names of a kernel's arguments, each an attribute whose value is its index in the argument array.

    Numba treats it as a named tuple. Real named tuples for all kernels would take 4 ms to create.

    Attributes:
        _fields: the names, in order.
    """

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]] = ()

    def _asdict(self) -> dict[str, int]:
        """Return each name with its index."""
        return dict(zip(self._fields, self, strict=True))


class Kernel(NamedTuple):
    """A kernel's row in the table: its arguments, modules and grid.

    Attributes:
        arguments: the indices of the kernel's arguments.
        cpu, cuda: its module in localllm.kernels.cpu and in localllm.kernels.cuda; empty without a kernel there.
        grid: its row in GRIDS of localllm.kernels.cuda.
        inputs: the names of the arguments that are activations, in the order of the operation's inputs; None: the
            operation lowers itself to steps.
        in_place: whether it may write its result over its first input.
    """

    arguments: Any
    cpu: str
    cuda: str
    grid: str
    inputs: tuple[str, ...] | None = None
    in_place: bool = False


KERNELS: dict[str, Kernel] = {}


def declare_arguments(names: str) -> Any:
    """Declare a kernel's arguments, or the fields of a record that kernels share.

    names: separated by spaces, in the order of the array.
    """
    fields = tuple(names.split())
    indices = {name: index for index, name in enumerate(fields)}
    return type("Arguments", (ArgumentIndices,), {"__slots__": (), "_fields": fields, **indices})(indices.values())


def declare_kernel(
    name: str, names: Any, cpu: str, on_cuda: str = "", inputs: str | None = None, in_place: bool = False
) -> Any:
    """Add a row and return its arguments.

    names: names of its arguments, or the arguments of another row; cpu: its module; on_cuda: its module and its grid
    there, separated by a space; without a module: the same as on CPUs. inputs, in_place: see Kernel.
    """
    indices = declare_arguments(names) if isinstance(names, str) else names
    cuda, _, grid = on_cuda.rpartition(" ")
    KERNELS[name] = Kernel(
        indices, cpu, cuda or (grid and cpu), grid, inputs if inputs is None else tuple(inputs.split()), in_place
    )
    return indices
