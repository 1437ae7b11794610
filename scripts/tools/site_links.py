"""A hook of MkDocs: links to source files lead to the repository, and links named by a page's file get its title."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")
BOOSTS = {"decisions": 0.3, "sampling.md": 4, "which-model.md": 4}  # of pages or folders, in the site's search
NAMED_BY_FILE = re.compile(r"\[(?:docs/)?[\w/-]+(?:\.md|/)\]\(([\w./-]+\.md)(#[\w-]+)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links that leave docs/ by addresses in the repository, and names of files by titles of pages.

    Sets how much a page counts in the search, too.

    Raises FileNotFoundError for a link to nothing.
    """
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri.partition("/")[0], 1)}
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

    def titled(match: re.Match[str]) -> str:
        path = ROOT / normpath(str(folder / match[1]))
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") if path.exists() else match[1]
        return f"[{title}]({match[1]}{match[2] or ''})"

    return LINK.sub(target, NAMED_BY_FILE.sub(titled, markdown))
