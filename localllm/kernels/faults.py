"""What happens when a mapped file loses its end while it is in use: the system sends a bus error, in any thread.

To check sizes cannot help: the file may shrink between the check and the kernel that reads it, and kernels read for
seconds. So the signal has a handler, in native code, because Python's run later, on the main thread, and that may be
the one that waits for the kernel. It writes one line and ends the process with the exit code of a bad file.
"""

import ctypes
import signal

import llvmlite.binding as llvm

from localllm.errors import ModelError
from localllm.files.gguf_header import shown

_HANDLER = """
declare i64 @write(i32, ptr, i64)
declare void @_exit(i32)

@length = global i64 0
@message = global [{size} x i8] zeroinitializer

define void @handle(i32 %signal) {{
  %length = load i64, ptr @length
  %written = call i64 @write(i32 2, ptr @message, i64 %length)
  call void @_exit(i32 {code})
  unreachable
}}
"""
_kept: list[llvm.ExecutionEngine] = []  # the handler lives as long as the process


def end_on_bus_error(path: str) -> None:
    """From now on, a bus error means that the file `path` was changed. For programs, not for libraries."""
    if not hasattr(signal, "SIGBUS"):
        return
    line = f"localllm: error: {shown(path, 4096)}: the file got shorter, or its disk failed, while it was in use\n"
    message = line.encode(errors="replace")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=0)
    module = llvm.parse_assembly(_HANDLER.format(size=len(message), code=ModelError.exit_code))
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    ctypes.memmove(engine.get_global_value_address("message"), message, len(message))
    ctypes.c_int64.from_address(engine.get_global_value_address("length")).value = len(message)
    _kept.append(engine)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(int(signal.SIGBUS), engine.get_function_address("handle"))
