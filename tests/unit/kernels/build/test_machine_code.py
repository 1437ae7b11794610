"""Compare object files that we link ourselves with LLVM's linker."""

import ctypes
import subprocess
import sys

import llvmlite.binding as llvm
import pytest
from project import ROOT

from localllm.errors import LocalllmError
from localllm.kernels import machine
from localllm.kernels.build import machine_code
from localllm.kernels.build.machine_code import MachineCode, link_by_llvm
from localllm.system import cpu

SOURCE = """
declare double @exp(double)
@counter = global i64 5
@table = internal constant [4 x i64] [i64 10, i64 20, i64 30, i64 40]
@words = internal global [2 x ptr] [ptr @counter, ptr @add]

define i64 @look_up(i64 %place) {
  %cell = getelementptr [4 x i64], ptr @table, i64 0, i64 %place
  %value = load i64, ptr %cell
  ret i64 %value
}

define i64 @count(i64 %more) {
  %old = load i64, ptr @counter
  %new = call i64 @add(i64 %old, i64 %more)
  store i64 %new, ptr @counter
  ret i64 %new
}

define i64 @add(i64 %x, i64 %y) {
  %sum = add i64 %x, %y
  ret i64 %sum
}

define i64 @through_pointers(i64 %x) {
  %place = load volatile ptr, ptr @words
  %value = load i64, ptr %place
  %second = getelementptr ptr, ptr @words, i64 1
  %function = load volatile ptr, ptr %second
  %sum = call i64 %function(i64 %value, i64 %x)
  ret i64 %sum
}

define i64 @from_outside(i64 %x) {
  %number = sitofp i64 %x to double
  %power = call double @exp(double %number)
  %large = fmul double %power, 1.0e6
  %whole = fptosi double %large to i64
  ret i64 %whole
}
"""
NAMES = ["look_up", "count", "through_pointers", "from_outside"]
links_itself = pytest.mark.skipif(
    sys.platform == "darwin" or not llvm.get_default_triple().startswith("x86_64"), reason="LLVM links here"
)


def object_of(source: str) -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = cpu.get_object_triple(llvm.get_default_triple())
    machine = llvm.Target.from_triple(triple).create_target_machine(reloc="pic", codemodel="small")
    return machine.emit_object(llvm.parse_assembly(source))


def answers(addresses: dict[str, int]) -> list[int]:
    """Return the results of the functions of SOURCE."""
    call = {name: ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address) for name, address in addresses.items()}
    return [call[name](number) for name in NAMES for number in (0, 1, 2, 3)]


def test_linked_functions_do_what_those_linked_by_llvm_do():
    code = object_of(SOURCE)
    ours, engine = MachineCode([code], NAMES), link_by_llvm([code])
    theirs = answers({name: engine.get_function_address(name) for name in NAMES})
    assert answers(ours.addresses) == theirs
    assert theirs[:8] == [10, 20, 30, 40, 5, 6, 8, 11]


def rights(address: int) -> str:
    """Return the access rights of the memory at an address, e.g. "rw" or "rx"."""
    if sys.platform == "win32":
        information = (
            ctypes.c_uint64 * 6
        )()  # MEMORY_BASIC_INFORMATION, whose PAGE_ rights are the tenth of its 32-bit words
        assert ctypes.windll.kernel32.VirtualQuery(ctypes.c_void_p(address), information, ctypes.c_size_t(48))
        return {0x04: "rw", 0x20: "rx"}.get(information[4] >> 32, hex(information[4] >> 32))
    with open("/proc/self/maps") as maps:
        rows = [line.split() for line in maps]
    spans = {tuple(int(end, 16) for end in row[0].split("-")): row[1] for row in rows}
    (access,) = (rights for (start, end), rights in spans.items() if start <= address < end)
    return access.strip("p").replace("-", "")


@links_itself
def test_memory_is_writable_or_executable_but_not_both():
    """Keep a faulty kernel from changing the code of kernels."""
    code = MachineCode([object_of(SOURCE)], ["count", "counter"])
    assert [rights(code.addresses[name]) for name in ("count", "counter")] == ["rx", "rw"]


@links_itself
def test_unknown_functions_and_relocations_are_refused():
    with pytest.raises(LocalllmError, match="there is no function nonsense_of_localllm on this computer"):
        MachineCode([object_of(SOURCE.replace("@exp", "@nonsense_of_localllm"))], NAMES)
    code = bytearray(object_of(SOURCE))
    for section in machine_code.read_sections(bytes(code)):
        if section.type == machine_code.RELOCATIONS:
            code[section.start + 8] = 77
    with pytest.raises(LocalllmError, match="unknown type 77"):
        MachineCode([bytes(code)], NAMES)


def test_loading_compiled_kernels_does_not_import_llvmlite():
    """Load them without llvmlite, whose import takes 50 ms."""
    library = "from localllm.kernels.build.library import KernelLibrary"
    program = f"import sys; {library}; KernelLibrary(['add']); print('llvmlite' in sys.modules)"
    for _ in range(2):  # the first may compile
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"{not machine_code.is_x86_64(object_of(SOURCE))}\n", done.stderr


def test_the_detected_processor_is_cached_for_this_computer(tmp_path, monkeypatch):
    """Use Linux's description as the key, so that another computer with the same home asks LLVM."""
    detected = []
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "detect_by_llvm", lambda: detected.append(1) or ("znver9", "+sse2,-avx"))
    for information, times in ((b"model 1", 1), (b"model 1", 1), (b"model 2", 2), (None, 3)):
        monkeypatch.setattr(cpu, "get_processor_key", lambda: information)  # noqa: B023
        assert machine.detect_processor.__wrapped__() == ("znver9", "+sse2,-avx")
        assert len(detected) == times
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes() + b"!")
    monkeypatch.setattr(cpu, "get_processor_key", lambda: b"model 1")
    machine.detect_processor.__wrapped__()
    assert len(detected) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="Windows says it elsewhere")
def test_processor_information_ignores_the_clock_but_not_features(tmp_path):
    first = (
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
        "stepping\t: 1\ncpu MHz\t\t: 2596.1\nflags\t\t: fpu sse2\n"
    )
    descriptions = []
    for text in (
        first + "\n",
        first.replace("2596.1", "3100.0") + "\nprocessor\t: 1\n",
        first.replace("sse2", "avx") + "\n",
    ):
        (tmp_path / "cpuinfo").write_text(text)
        descriptions.append(cpu.get_processor_key(str(tmp_path / "cpuinfo")))
    assert descriptions[0] == descriptions[1] != descriptions[2]
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd\n\n")
    assert cpu.get_processor_key(str(tmp_path / "cpuinfo")) is None
    assert cpu.get_processor_key(str(tmp_path / "nothing")) is None
