"""Test that another process's output is read to its end, and a bounded part of it kept."""

import os

from localllm.system.processes import PipeReader


def read(data: bytes, most: int, keeps_end: bool = False) -> PipeReader:
    source, target = os.pipe()
    reader = PipeReader(os.fdopen(source, "rb"), most, keeps_end)
    with os.fdopen(target, "wb") as file:
        file.write(data)
    reader.thread.join(10)
    assert not reader.thread.is_alive()
    return reader


def test_the_first_bytes_are_kept_with_a_note():
    assert read(b"abcdef", 4).get_text() == "abcd\n[cut: of 6 bytes]" and read(b"abcd", 4).get_text() == "abcd"


def test_the_last_bytes_are_kept_without_a_note():
    reader = read(b"x" * 1_000_000 + b"\nthe end \n\n", 100, keeps_end=True)
    assert (len(reader.get_text()), reader.size, reader.get_last_line()) == (100, 1_000_011, "the end")


def test_a_writer_never_waits_for_a_full_pipe():
    assert read(b"y" * 5_000_000, 10).size == 5_000_000


def test_an_empty_pipe_has_no_last_line():
    assert read(b"", 10, keeps_end=True).get_last_line() == "" == read(b" \n\n", 10, keeps_end=True).get_last_line()
