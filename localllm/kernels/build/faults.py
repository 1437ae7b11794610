"""What happens when a mapped file loses its end while it is in use: the system sends a bus error, in any thread.

To check sizes cannot help: the file may shrink between the check and the kernel that reads it, and kernels read for
seconds. So the signal has a handler, in native code, because Python's run later, on the main thread, and that may be
the one that waits for the kernel. It writes one line and ends the process with the exit code of a bad file; a second
thread that gets there meanwhile waits for that end.
"""

import ctypes
import signal
import zlib
from contextlib import suppress

from localllm.errors import ModelError
from localllm.files.gguf_header import shown
from localllm.files.kept import read_kept, write_kept
from localllm.kernels.build.machine_code import MachineCode
from localllm.kernels.build.objects import object_file

SIZE = 1 << 13  # bytes for the line
HANDLER = f"""
declare i64 @write(i32, ptr, i64)
declare void @_exit(i32)
declare i32 @pause()

@length = global i64 0
@message = global [{SIZE} x i8] zeroinitializer

define void @handle(i32 %signal) {{
  %length = atomicrmw xchg ptr @length, i64 0 seq_cst
  %is_first = icmp ne i64 %length, 0
  br i1 %is_first, label %tell, label %wait

tell:
  %written = call i64 @write(i32 2, ptr @message, i64 %length)
  call void @_exit(i32 {ModelError.exit_code})
  unreachable

wait:
  %never = call i32 @pause()
  br label %wait
}}

define ptr @place_of_length() {{
  ret ptr @length
}}

define ptr @place_of_message() {{
  ret ptr @message
}}
"""
_kept: list[MachineCode] = []  # the handler lives as long as the process


def end_on_bus_error(path: str) -> None:
    """From now on, a bus error means that the file `path` was changed. For programs, not for libraries."""
    if not hasattr(signal, "SIGBUS"):
        return
    line = f"localllm: error: {shown(path, 1000)}: the file got shorter, or its disk failed, while it was in use\n"
    message = line.encode(errors="replace")[:SIZE]
    code = MachineCode([handler()], ["handle", "place_of_length", "place_of_message"])
    length, text = (
        ctypes.CFUNCTYPE(ctypes.c_void_p)(code.addresses[f"place_of_{name}"])() for name in ("length", "message")
    )
    ctypes.memmove(text, message, len(message))
    ctypes.c_int64.from_address(length).value = len(message)
    _kept.append(code)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(int(signal.SIGBUS), code.addresses["handle"])


def handler() -> bytes:
    """An object file, compiled once per computer as kernels are: compiling takes 9 MB of memory."""
    path = object_file(f"handle_bus_error_{zlib.crc32(HANDLER.encode()):08x}")
    if code := read_kept(path):
        return code
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
    code = machine.emit_object(llvm.parse_assembly(HANDLER))
    with suppress(OSError):  # of which the kernels warn
        write_kept(path, code)
    return code
