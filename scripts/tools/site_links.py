"""A hook of MkDocs: links from docs/ to source files lead to the repository, so that they work on the site as well."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links that leave docs/ by addresses in the repository. Raises FileNotFoundError for one to nothing."""
    folder = PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent

    def target(match: re.Match[str]) -> str:
        path, mark, heading = match[1].partition("#")
        inside = normpath(str(folder / path))
        if inside.startswith("docs/"):
            return match[0]
        if not (ROOT / inside).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {match[1]}")
        view = "tree" if (ROOT / inside).is_dir() else "blob"
        return f"]({config.repo_url.rstrip('/')}/{view}/main/{inside}{mark}{heading})"

    return LINK.sub(target, markdown)
