"""An index of passages in an SQLite file: words by FTS5, and vectors.

Only changed files are indexed again: a file is unchanged if its size and modification time are, or the hash of its
content. A passage with the same text keeps its vector.
"""

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from localllm.errors import LocalllmError, UsageError
from localllm.files.documents import is_document, read_document
from localllm.files.safe_file import create_private_folder
from localllm.services.search.files import read_text
from localllm.services.search.passages import SIZE, Passage, split_passages

VERSION = "4"  # version of the database schema
BATCH = 64  # passages embedded and written together
TABLES = """
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER, mtime INTEGER, digest BLOB);
CREATE TABLE IF NOT EXISTS passages (
    id INTEGER PRIMARY KEY, path TEXT, first INTEGER, last INTEGER, heading TEXT, page INTEGER, text TEXT,
    key BLOB, vector BLOB);
CREATE INDEX IF NOT EXISTS by_path ON passages (path);
CREATE INDEX IF NOT EXISTS by_key ON passages (key);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(path, heading, text, tokenize='porter unicode61');
"""
Embed = Callable[[list[str]], np.ndarray]


class PassageIndex:
    """The passages of files; a context manager.

    Attributes:
        added: count of passages added since the index was opened.
        unreadable: for each document that the latest update could not read, a line that says why.
    """

    def __init__(self, path: Path | None, size: int = SIZE):
        """Open or create an index.

        path: None for an index in memory.  size: characters of a passage, see passages.py.
        """
        self._size, self.added, self.unreadable = size, 0, list[str]()
        self._sql = open_database(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._sql.close()

    def update(self, paths: Sequence[str], progress: Callable[[int, int], object] = lambda done, count: None) -> None:
        """Index new and changed files; remove files that are not among the paths."""
        current, self.unreadable = {*paths}, []
        with self._sql:
            for (gone,) in self._sql.execute("SELECT path FROM files").fetchall():
                if gone not in current:
                    self._remove(gone)
            for number, path in enumerate(paths):
                self._update_file(path)
                progress(number + 1, len(paths))

    def add(self, passages: Iterable[Passage]) -> None:
        """Add passages that come from no file."""
        with self._sql:
            self._insert(passages)

    def _update_file(self, path: str) -> None:
        try:
            status = os.stat(path)
        except OSError:
            return self._remove(path)
        old = self._sql.execute("SELECT size, mtime, digest FROM files WHERE path = ?", (path,)).fetchone()
        if old and old[:2] == (status.st_size, status.st_mtime_ns):
            return
        try:
            text = read_document(path) if is_document(path) else read_text(path)
        except UsageError as error:  # not stored: a package may be installed, or the file repaired
            self.unreadable.append(str(error))
            return self._remove(path)
        key = b"" if text is None else hash_text(text)
        self._sql.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)",
                          (path, status.st_size, status.st_mtime_ns, key))  # fmt: skip
        if old and old[2] == key:
            return
        vectors = dict(
            self._sql.execute("SELECT key, vector FROM passages WHERE path = ? AND vector IS NOT NULL", (path,))
        )
        self._remove_passages(path)
        if text is not None:
            self._insert(split_passages(path, text, self._size), vectors)

    def _insert(self, passages: Iterable[Passage], vectors: dict[bytes, bytes] | None = None) -> None:
        for each in passages:
            key = hash_text(each.embedded)
            place = each.path, each.first, each.last, each.heading, each.page
            cursor = self._sql.execute(
                "INSERT INTO passages (path, first, last, heading, page, text, key, vector)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*place, each.text, key, (vectors or {}).get(key)),
            )
            self._sql.execute(
                "INSERT INTO words (rowid, path, heading, text) VALUES (?, ?, ?, ?)",
                (cursor.lastrowid, each.path, each.heading, each.text),
            )
            self.added += 1

    def _remove(self, path: str) -> None:
        self._remove_passages(path)
        self._sql.execute("DELETE FROM files WHERE path = ?", (path,))

    def _remove_passages(self, path: str) -> None:
        self._sql.execute("DELETE FROM words WHERE rowid IN (SELECT id FROM passages WHERE path = ?)", (path,))
        self._sql.execute("DELETE FROM passages WHERE path = ?", (path,))

    def embed(self, make: Embed, progress: Callable[[int, int], object] = lambda done, count: None) -> int:
        """Compute the missing vectors; return their count.

        make: embeds texts, float32 [texts, width], of length 1. Finished batches are kept on interruption.
        """
        new = self._sql.execute("SELECT id FROM passages WHERE vector IS NULL ORDER BY length(text)").fetchall()
        for start in range(0, len(new), BATCH):
            some = [id for (id,) in new[start : start + BATCH]]
            vectors = make([self.read_passage(id).embedded for id in some])
            with self._sql:
                self._sql.executemany(
                    "UPDATE passages SET vector = ? WHERE id = ?",
                    [(vector.astype(np.float32).tobytes(), id) for id, vector in zip(some, vectors, strict=True)],
                )
            progress(min(start + BATCH, len(new)), len(new))
        return len(new)

    @property
    def count(self) -> int:
        return int(self._sql.execute("SELECT count(*) FROM passages").fetchone()[0])

    def read_passage(self, id: int) -> Passage:
        columns = "SELECT path, first, last, text, heading, page FROM passages WHERE id = ?"
        return Passage(*self._sql.execute(columns, (id,)).fetchone())

    def search_words(self, words: Sequence[str], limit: int) -> list[int]:
        """Return the ids of passages with any of the words, best BM25 first; words in headings count double."""
        if not words:
            return []
        query = " OR ".join(f'"{word}"' for word in words)
        best = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words, 1.0, 2.0, 1.0), rowid LIMIT ?"
        return [id for (id,) in self._sql.execute(best, (query, limit))]

    def search_vectors(self, query: np.ndarray) -> list[tuple[int, float]]:
        """Return the ids of passages and their cosines with the query, float32 [width], nearest first."""
        rows = self._sql.execute("SELECT id, vector FROM passages WHERE vector IS NOT NULL ORDER BY id").fetchall()
        if not rows:
            return []
        matrix = np.frombuffer(b"".join(vector for _, vector in rows), np.float32).reshape(len(rows), -1)
        cosines = matrix @ query.astype(np.float32)
        order = np.argsort(-cosines, kind="stable")
        return [(rows[number][0], float(cosines[number])) for number in order]


def open_database(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        with suppress(OSError, LocalllmError, sqlite3.Error):
            create_private_folder(path.parent)
            return create_tables(path)
        with suppress(OSError, sqlite3.Error):
            path.unlink()
            return create_tables(path)
    return create_tables(":memory:")


def create_tables(path: Path | str) -> sqlite3.Connection:
    sql = sqlite3.connect(path, timeout=60)
    try:
        sql.executescript(TABLES)
    except sqlite3.Error:
        sql.close()
        raise
    return sql


def hash_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()


def get_index_path(folder: Path, names: Sequence[str], parts: Sequence[object]) -> Path:
    """Return the path of the index of these files and folders; parts: other values that it depends on."""
    key = repr([VERSION, sorted(os.path.realpath(name) for name in names), os.getcwd(), *parts])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.sqlite"
