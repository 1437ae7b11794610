"""The handler for unreadable pages of a mapped file, after the file was truncated or its disk removed.

The operating system then raises SIGBUS, or on Windows an exception, in any thread. Checking sizes cannot prevent that:
the file may shrink between the check and the end of a kernel, which may run for seconds. The handler is native code,
because a Python handler would run later, on the main thread, which may be waiting for the kernel. It writes one line
and ends the process with the exit code of a bad file. A second thread that faults meanwhile waits.
"""

import ctypes
import zlib
from contextlib import suppress

from localllm.errors import ModelError
from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.files.gguf.header import printable
from localllm.kernels.build.machine_code import MachineCode
from localllm.kernels.build.objects import get_object_file
from localllm.system.cpu import get_object_triple
from localllm.system.processes import BAD_PAGE_HANDLER, handle_bad_pages

MESSAGE_BYTES = 1 << 13  # bytes for the message
DATA = f"""
@length = global i64 0
@message = global [{MESSAGE_BYTES} x i8] zeroinitializer

define ptr @place_of_length() {{
  ret ptr @length
}}

define ptr @place_of_message() {{
  ret ptr @message
}}
"""
_handlers: list[MachineCode] = []  # keeps the handler alive until the process ends


def end_on_bus_error(path: str) -> None:
    """Install the handler, which ends the process when a page of the file `path` cannot be read.

    Only the command line installs it: a library must not end its host process.
    """
    line = f"localllm: error: {printable(path, 1000)}: the file got shorter, or its disk failed, while it was in use\n"
    message = line.encode(errors="replace")[:MESSAGE_BYTES]
    code = MachineCode([load_handler()], ["handle", "place_of_length", "place_of_message"])
    length, text = (
        ctypes.CFUNCTYPE(ctypes.c_void_p)(code.addresses[f"place_of_{name}"])() for name in ("length", "message")
    )
    ctypes.memmove(text, message, len(message))
    ctypes.c_int64.from_address(length).value = len(message)
    _handlers.append(code)
    handle_bad_pages(code.addresses["handle"])


def load_handler() -> bytes:
    """Return the object file of the handler, compiled once per computer like kernels.

    Compiling takes 9 MB of memory.
    """
    source = build_handler_source(BAD_PAGE_HANDLER)
    path = get_object_file(compute_handler_name(source))
    if code := read_checksummed(path):
        return code
    from localllm.kernels.build.shipped import read_shipped_objects  # needed once per computer

    code = read_shipped_objects([path.stem]).get(path.stem) or compile_handler(source)
    with suppress(OSError):  # compiling kernels warns about an unwritable cache
        write_checksummed(path, code)
    return code


def build_handler_source(functions: str) -> str:
    """Return the handler in LLVM IR.

    functions: the functions of an operating system in LLVM IR, such as BAD_PAGE_HANDLER of localllm.system.processes.
    """
    return DATA + functions.replace("%EXIT_CODE%", str(ModelError.exit_code))


def compute_handler_name(source: str) -> str:
    return f"handle_bus_error_{zlib.crc32(source.encode()):08x}"


def compile_handler(source: str, triple: str | None = None) -> bytes:
    """Compile the handler to an object file.

    triple: LLVM's name of the operating system, by default this one.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(triple or get_object_triple(llvm.get_default_triple())).create_target_machine(
        reloc="pic", codemodel="small"
    )
    return machine.emit_object(llvm.parse_assembly(source))
