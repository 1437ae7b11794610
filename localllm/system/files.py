"""File operations: user folders, permissions, names, atomic replacement and syncing."""

import ctypes
import errno
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NoReturn

NAME_UNITS = 255  # maximum length of a file name on almost all systems: in bytes, on Windows in UTF-16 units
# Windows: names of devices, with any suffix, and characters that are not allowed in names.
DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[1-9¹²³])\s*(\.|:|$)", re.IGNORECASE)
FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f]')
REPLACE_SECONDS = 1.0  # seconds to retry on Windows: a virus scanner may have the file open
# Windows: CreateFileW's access and sharing flags, and a disposition.
READ, WRITE, SHARE_ALL, OPEN_EXISTING = 0x80000000, 0x40000000, 1 | 2 | 4, 3


# ---- folders and names


def get_user_folder(kind: str) -> Path:
    """Return the user's folder for "data", "state", "config" or "cache".

    The XDG variable has priority if it is an absolute path; otherwise it is the operating system's convention.
    """
    if variable := get_folder_variable(kind):
        return Path(os.environ[variable]) / "localllm"
    usual = get_default_folder(kind) / "localllm"
    return usual / "cache" if kind == "cache" and sys.platform == "win32" else usual


def get_folder_variable(kind: str) -> str:
    """Return the environment variable that sets a folder, or "" if it is unset or relative."""
    name = f"XDG_{kind.upper()}_HOME"
    return name if to_absolute_path(os.environ.get(name)) else ""


def get_default_folder(kind: str) -> Path:
    """Return the operating system's conventional folder; kind: see `get_user_folder`."""
    home = to_absolute_path(os.path.expanduser("~")) or Path("/")
    if sys.platform == "win32":  # APPDATA roams with the user to other computers, LOCALAPPDATA does not
        if kind == "config":
            return to_absolute_path(os.environ.get("APPDATA")) or home / "AppData" / "Roaming"
        return to_absolute_path(os.environ.get("LOCALAPPDATA")) or home / "AppData" / "Local"
    if sys.platform == "darwin" and kind != "config":
        return home / "Library" / ("Caches" if kind == "cache" else "Application Support")
    usual = {"data": (".local", "share"), "state": (".local", "state"), "config": (".config",), "cache": (".cache",)}
    return home.joinpath(*usual[kind])


def to_absolute_path(folder: str | None) -> Path | None:
    """Return the folder as a path; None if it is empty or relative, which the XDG specification says to ignore."""
    return Path(folder) if folder and os.path.isabs(folder) else None


def is_private(place: Path | int) -> bool:
    """Return whether only this user and root can write to a folder or an open file (a descriptor).

    Always True on Windows, where a user's folders are private by inheritance.
    """
    if sys.platform == "win32":
        return True
    try:
        status = os.stat(place)
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def get_cache_folder() -> Path:
    """Return the folder for files that can be recreated; the variable LOCALLLM_CACHE overrides it.

    The path is always absolute, so that no machine code from the current directory is run.
    """
    return to_absolute_path(os.environ.get("LOCALLLM_CACHE")) or get_user_folder("cache")


def make_private_folder(folder: Path) -> None:
    """Create a folder, and its parent, that only this user can write to. Raises OSError if others can."""
    for each in (folder.parent, folder):
        each.mkdir(0o700, parents=True, exist_ok=True)
        if not is_private(each):
            raise PermissionError(errno.EACCES, "other users can write to this folder")


def find_name_problem(name: str) -> str | None:
    """Return why no file can have this name on this operating system; None for a valid name."""
    if sys.platform != "win32":
        units = len(os.fsencode(name))
    else:
        units = len(name.encode("utf-16-le", "surrogatepass")) // 2
        if reserved := FORBIDDEN.search(name):
            return f"a file name cannot contain {reserved[0]!r} on Windows"
        if DEVICES.match(name):
            return "this name is reserved for a device on Windows"
        if name.endswith((".", " ")):
            return "a file name cannot end in a dot or a space on Windows"
    kind = "characters" if sys.platform == "win32" else "bytes"
    return f"a file name has at most {NAME_UNITS} {kind}" if units > NAME_UNITS else None


def get_file_version(place: str | os.PathLike[str] | int) -> tuple[int, int, int]:
    """Return a file's size, mtime and ctime, one of which changes with its content. Raises OSError.

    place: a path or a descriptor. Times are in nanoseconds. Programs can set mtime, but not ctime, the time of the last
    change of content or name; ctime is 0 on Windows file systems that do not store it.
    """
    state = os.stat(place)
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns if sys.platform != "win32" else get_change_time(place)


class BasicInfo(ctypes.Structure):
    """Windows' FILE_BASIC_INFO; times in 100 nanoseconds since 1601."""

    _fields_ = (
        ("made", ctypes.c_int64),
        ("read", ctypes.c_int64),
        ("written", ctypes.c_int64),
        ("changed", ctypes.c_int64),
        ("attributes", ctypes.c_uint32),
    )


def get_change_time(place: str | os.PathLike[str] | int) -> int:
    """Return when a file or its name changed, in nanoseconds, on Windows. Raises OSError.

    There, os.stat's st_ctime is the creation time.
    """
    import msvcrt

    if not isinstance(place, int):
        descriptor = open_file(place, os.O_RDONLY)
        try:
            return get_change_time(descriptor)
        finally:
            os.close(descriptor)
    info, ask = BasicInfo(), load_kernel32().GetFileInformationByHandleEx
    ask.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32]
    if not ask(msvcrt.get_osfhandle(place), 0, ctypes.byref(info), ctypes.sizeof(info)):  # type: ignore[attr-defined]
        raise ctypes.WinError(ctypes.get_last_error())  # type: ignore[attr-defined]
    return int(info.changed) * 100


def get_free_bytes(folder: Path) -> int:
    """Return the bytes that an ordinary user may still write to a folder's disk. Raises OSError."""
    if sys.platform == "win32":
        import shutil  # slow to import

        return shutil.disk_usage(folder).free
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize


# ---- opening


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file as os.open does, in binary mode, not inherited by subprocesses. Raises OSError.

    On Windows, unlike with os.open, other programs may rename, replace and remove the file while it is open.
    """
    if sys.platform == "win32":
        return open_shared(os.fspath(path), flags)
    return os.open(path, flags | os.O_CLOEXEC, mode)


def open_without_links(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file without following a symbolic link (except on Windows) and without blocking. Raises OSError."""
    return open_file(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), mode)


def open_shared(path: str, flags: int) -> int:
    """Open a file on Windows so that it can be removed or renamed while it is open."""
    import msvcrt

    write = flags & (os.O_WRONLY | os.O_RDWR)
    access = (WRITE if write else 0) | (READ if flags & os.O_RDWR or not write else 0)
    handle = create_handle(path, access, OPEN_EXISTING if not flags & os.O_CREAT else 1 if flags & os.O_EXCL else 4)
    open_flags = flags & (os.O_APPEND | os.O_RDONLY) | os.O_BINARY | os.O_NOINHERIT  # type: ignore[attr-defined]
    return int(msvcrt.open_osfhandle(handle, open_flags))  # type: ignore[attr-defined]


def create_handle(path: str, access: int, disposition: int, attributes: int = 0x80) -> int:
    """Open a file that other programs may rename and remove, and return Windows' handle. Raises OSError.

    access: READ, WRITE or both.  disposition: OPEN_EXISTING, 1 (CREATE_NEW) or 4 (OPEN_ALWAYS).  attributes: and flags.
    """
    create = load_kernel32().CreateFileW
    create.restype = ctypes.c_void_p
    numbers = [ctypes.c_uint32] * 2
    create.argtypes = [ctypes.c_wchar_p, *numbers, ctypes.c_void_p, *numbers, ctypes.c_void_p]
    handle = create(to_long_path(path), access, SHARE_ALL, None, disposition, attributes, None)
    if handle in (None, ctypes.c_void_p(-1).value):
        raise_last_error(path)
    return int(handle)


def raise_last_error(path: str | None = None) -> NoReturn:
    """Raise the OSError of the latest call of a Windows function."""
    error = ctypes.WinError(ctypes.get_last_error())  # type: ignore[attr-defined]
    raise type(error)(error.errno, error.strerror, path, error.winerror)


def allow_long_paths() -> None:
    """Allow this process paths of over 260 characters on Windows 10 and 11, regardless of the registry.

    python.exe declares that it supports them, but Windows accepts them only if LongPathsEnabled is set in the registry.
    Windows then sets IsLongPathAwareProcess, a bit of byte 3 of the process environment block. This function sets the
    bit itself, which is undocumented but unchanged since 2017, as Go's programs do.
    """
    if sys.platform == "win32" and sys.getwindowsversion()[:3] >= (10, 0, 15063):
        find = ctypes.WinDLL("ntdll").RtlGetCurrentPeb
        find.restype = ctypes.c_void_p
        ctypes.c_uint8.from_address(find() + 3).value |= 0x80


def to_long_path(path: str) -> str:
    r"""Prefix a long Windows path with \\\\?\\, which allows over 260 characters."""
    path = os.path.abspath(path)
    if path.startswith("\\\\?\\") or len(path) < 248:
        return path
    return "\\\\?\\UNC\\" + path[2:] if path.startswith("\\\\") else "\\\\?\\" + path


def load_kernel32() -> ctypes.CDLL:
    """Load Windows' kernel32 library so that ctypes keeps GetLastError."""
    loaded: ctypes.CDLL = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined]
    return loaded


def read_at(descriptor: int, size: int, position: int) -> bytes:
    """Read up to `size` bytes of a file at a position. Raises OSError."""
    if sys.platform == "win32":
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.read(descriptor, size)
    return os.pread(descriptor, size, position)


def write_at(descriptor: int, data: memoryview, position: int) -> int:
    """Write bytes at a position; return how many were written. Raises OSError."""
    if sys.platform == "win32":
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.write(descriptor, data)
    return os.pwrite(descriptor, data, position)


# ---- atomic writing


def open_nameless_file(folder: str) -> int:
    """Create a file that disappears when closed, unless `link_nameless_file` is called; return its descriptor.

    Raises OSError where the operating system does not support this.
    """
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):  # link_nameless_file needs it
        raise OSError
    return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)


def link_nameless_file(descriptor: int, path: str) -> None:
    """Link a nameless file to a path. Raises OSError."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def create_temporary_file(folder: str, prefix: str) -> tuple[int, str]:
    """Create a file with a unique name and default permissions; return descriptor and path. Raises OSError."""
    if sys.platform == "win32":
        while True:
            path = os.path.join(folder, f"{prefix}{os.urandom(6).hex()}.tmp")
            with suppress(FileExistsError):
                return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), path
    import tempfile  # seldom needed, and slow to import

    descriptor, path = tempfile.mkstemp(".tmp", prefix, folder)
    mask = os.umask(0o077)  # the umask can be read only by changing it
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)
    return descriptor, path


@contextmanager
def open_temporary_file() -> Iterator[tuple[FileIO, str]]:
    """Yield an empty file, open for writing, and a path to open it by; remove it after the block."""
    import tempfile

    if sys.platform != "win32":
        with tempfile.TemporaryFile(buffering=0) as file:
            yield file, f"/dev/fd/{file.fileno()}"
        return
    descriptor, path = create_temporary_file(tempfile.gettempdir(), "localllm-")
    try:
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            yield file, path
    finally:
        with suppress(OSError):  # still mapped: left to the system's cleanup of temporary files
            os.unlink(path)


def replace_file(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file over another one, atomically. Raises OSError.

    Windows refuses to replace a file that is mapped, or that most programs have open: retry for REPLACE_SECONDS.
    """
    end = time.monotonic() + (REPLACE_SECONDS if sys.platform == "win32" else 0)
    while True:
        try:
            os.replace(path, target)
            return
        except PermissionError as error:
            if time.monotonic() >= end:
                if sys.platform == "win32" and os.path.exists(target):
                    reason = "the file is open in this or another program"
                    raise PermissionError(error.errno, reason, os.fspath(target)) from None
                raise
        time.sleep(0.05)


def can_replace_open_files() -> bool:
    """Return whether a file can be replaced while this process has it open."""
    return sys.platform != "win32"


def sync_file(descriptor: int) -> None:
    """Wait until written data is on the disk. Raises OSError.

    On macOS, fsync leaves data in the disk's cache; F_FULLFSYNC flushes it, if the file system supports that.
    """
    if sys.platform == "darwin":
        import fcntl

        try:
            fcntl.fcntl(descriptor, getattr(fcntl, "F_FULLFSYNC", 51))
            return
        except OSError:
            pass
    os.fsync(descriptor)


def sync_folder(folder: str) -> None:
    """Sync a folder, so that a new name in it survives a power failure; do nothing on Windows. Raises OSError."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
