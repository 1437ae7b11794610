"""A linker that loads ELF object files for x86-64 into this process; others go to LLVM's linker.

There are two reasons for a linker of our own. Importing llvmlite takes 50 ms of every start. And LLVM's linker
allocates memory section by section: in a process with a fragmented address space (a Ray worker, for example) sections
may be over 2 GB apart, which 32-bit distances cannot bridge, and LLVM aborts the process. This linker loads an object
file into one range of memory.

Kernels are position-independent code in the small code model, so only a few types of relocations occur. Source: System
V ABI, AMD64 supplement, chapter 4 (object files), https://gitlab.com/x86-psABIs/x86-64-ABI
"""

import ctypes
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from localllm.errors import LocalllmError, MemoryLimitError
from localllm.system.memory import PAGE, allocate_code, make_executable
from localllm.system.processes import find_function_address

ELF, X86_64 = b"\x7fELF\x02\x01", 62  # first bytes of a 64-bit little-endian file; the instruction set
SYMBOLS, RELOCATIONS, ZEROS = 2, 4, 8  # types of sections
WRITABLE, ALLOCATED = 1, 2  # flags of sections
UNWINDING_SUFFIX = "eh_frame"  # end of the name of sections for exceptions, which no kernel raises: not loaded
ADDRESS, DISTANCE, CALL, FROM_TABLE = 1, 2, 4, (9, 41, 42)  # R_X86_64_64, _PC32, _PLT32, _GOTPCREL and its variants
JUMP = b"\xff\x25\x02\0\0\0\xcc\xcc"  # instruction: jump to the address stored after it
SLOT = 16  # bytes: JUMP and an address, for a function outside the object file or a symbol of the offset table


class SectionEntry(NamedTuple):
    """An entry of an ELF section table, field by field."""

    name: int
    type: int
    flags: int
    address: int
    start: int  # offset in the file
    size: int
    link: int  # for a symbol table: the section with the symbols' names
    changed: int  # for a table of relocations: the section that they change
    alignment: int
    entry_size: int


class SymbolEntry(NamedTuple):
    """A symbol of an ELF object file: its name and where it is defined."""

    name: str
    is_global: bool
    section: int  # 0: outside this object file
    place: int  # offset in the section


class Relocation(NamedTuple):
    """A position in a section at which the linker writes an address or a distance."""

    section: int
    place: int  # offset in the section
    type: int
    symbol: int
    addend: int


class MachineCode:
    """Object files, linked and loaded. Keep the object alive while the addresses are used.

    Attributes:
        addresses: addresses of the requested symbols, by name.
    """

    def __init__(self, objects: Iterable[bytes], names: Iterable[str]):
        """Link object files; names: the symbols to look up.

        Raises LocalllmError, for example if there is not enough memory.
        """
        objects = list(objects)
        if all(is_x86_64(code) for code in objects):
            self._held: Any = [LoadedObject(code) for code in objects]
            known = {name: address for image in self._held for name, address in image.addresses.items()}
            self.addresses = {name: known[name] for name in names}
        else:
            self._held = link_by_llvm(objects)
            self.addresses = {name: self._held.get_function_address(name) for name in names}


def is_x86_64(code: bytes) -> bool:
    """Return whether an object file is ELF for x86-64."""
    return code.startswith(ELF) and int.from_bytes(code[18:20], "little") == X86_64


def link_by_llvm(objects: list[bytes]) -> Any:
    """Link object files with LLVM's own linker; return its execution engine."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    for code in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


class LoadedObject:
    """An object file in memory.

    It has, in order, read-only and executable sections, slots, and, on separate pages, writable sections.

    Attributes:
        addresses: addresses of global symbols, by name.
    """

    def __init__(self, code: bytes):
        """Load and link an object file. Raises LocalllmError."""
        sections = read_sections(code)
        symbols, relocations = read_symbols(code, sections), list(read_relocations(code, sections))
        fixed, slots, written, size = plan_layout(code, sections, relocations, symbols)
        places = fixed | written
        try:
            self._held = allocate_code(size)
        except OSError:
            raise MemoryLimitError("not enough memory for machine code") from None
        base, memory = ctypes.addressof(ctypes.c_char.from_buffer(self._held)), memoryview(self._held).cast("B")
        for number, place in places.items():
            section = sections[number]
            if section.type != ZEROS:
                memory[place : place + section.size] = code[section.start : section.start + section.size]
        known = {index: base + places[s.section] + s.place for index, s in enumerate(symbols) if s.section in places}
        for index, place in slots.items():
            address = known[index] if index in known else find_function(symbols[index].name)
            memory[place : place + SLOT] = JUMP + address.to_bytes(8, "little")
        for relocation in relocations:
            if relocation.section in places:
                apply_relocation(memory, base, places[relocation.section] + relocation.place, relocation, known, slots)
        try:
            make_executable(base, min(written.values(), default=size))
        except OSError as error:
            raise LocalllmError(f"the system does not allow running generated machine code: {error.strerror}") from None
        self.addresses = {symbols[index].name: at for index, at in known.items() if symbols[index].is_global}


def read_sections(code: bytes) -> list[SectionEntry]:
    """Read the section table of an object file."""
    (start,), (count,) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<H", code, 60)
    rows = struct.iter_unpack("<IIQQQQIIQQ", code[start : start + 64 * count])
    return [SectionEntry(*row) for row in rows]


def read_symbols(code: bytes, sections: Sequence[SectionEntry]) -> list[SymbolEntry]:
    """Read the symbol table of an object file."""
    table = next((section for section in sections if section.type == SYMBOLS), None)
    if table is None:
        return []
    names = sections[table.link].start
    rows = struct.iter_unpack("<IBBHQQ", code[table.start : table.start + table.size])
    return [
        SymbolEntry(read_string(code, names + name), info >= 16, section, place)
        for name, info, _, section, place, _ in rows
    ]


def read_string(code: bytes, start: int) -> str:
    """Return the zero-terminated string at offset `start`."""
    return code[start : code.index(b"\0", start)].decode()


def read_relocations(code: bytes, sections: Sequence[SectionEntry]) -> Iterator[Relocation]:
    """Yield all relocations of an object file."""
    for section in sections:
        if section.type == RELOCATIONS:
            for place, info, addend in struct.iter_unpack("<QQq", code[section.start : section.start + section.size]):
                yield Relocation(section.changed, place, info & 0xFFFFFFFF, info >> 32, addend)


def plan_layout(
    code: bytes, sections: Sequence[SectionEntry], relocations: Sequence[Relocation], symbols: Sequence[SymbolEntry]
) -> tuple[dict[int, int], dict[int, int], dict[int, int], int]:
    """Choose the offset in memory of each section and each slot.

    Return the offsets of read-only and executable sections, of slots (by symbol index) and of writable sections, and
    the total size.
    """
    names = sections[int.from_bytes(code[62:64], "little")].start
    needed = [
        number
        for number, section in enumerate(sections)
        if section.flags & ALLOCATED and not read_string(code, names + section.name).endswith(UNWINDING_SUFFIX)
    ]
    end, fixed, written = 0, dict[int, int](), dict[int, int]()
    for number in (number for number in needed if not sections[number].flags & WRITABLE):
        fixed[number] = align(end, sections[number].alignment)
        end = fixed[number] + sections[number].size
    end, slots = align(end, SLOT), dict[int, int]()
    for relocation in relocations:
        if relocation.section in needed and (relocation.type in FROM_TABLE or not symbols[relocation.symbol].section):
            slots.setdefault(relocation.symbol, end + SLOT * len(slots))
    end = align(end + SLOT * len(slots), PAGE)
    for number in (number for number in needed if sections[number].flags & WRITABLE):
        written[number] = align(end, sections[number].alignment)
        end = written[number] + sections[number].size
    return fixed, slots, written, end


def align(place: int, alignment: int) -> int:
    """Round up to a multiple of `alignment`."""
    return -(-place // max(1, alignment)) * max(1, alignment)


def apply_relocation(
    memory: memoryview, base: int, place: int, relocation: Relocation, addresses: dict[int, int], slots: dict[int, int]
) -> None:
    """Apply a relocation: write an address or a distance to `memory` at offset `place`.

    base: address of the memory; addresses: addresses of symbols, slots: offsets of slots, both by symbol index. Raises
    LocalllmError for an unknown type of relocation.
    """
    if relocation.type in FROM_TABLE:
        target = base + slots[relocation.symbol] + len(JUMP)
    elif relocation.type == CALL and relocation.symbol in slots and relocation.symbol not in addresses:
        target = base + slots[relocation.symbol]
    elif relocation.type in (ADDRESS, DISTANCE, CALL) and relocation.symbol in addresses:
        target = addresses[relocation.symbol]
    else:
        raise LocalllmError(f"machine code has a relocation of the unknown type {relocation.type}")
    if relocation.type == ADDRESS:
        struct.pack_into("<q", memory, place, target + relocation.addend)
    else:
        struct.pack_into("<i", memory, place, target + relocation.addend - base - place)


def find_function(name: str) -> int:
    """Return the address of a function of the C or math library.

    Raises LocalllmError if it does not exist.
    """
    if (address := find_function_address(name)) is None:
        raise LocalllmError(f"there is no function {name} on this computer, which machine code needs")
    return address
