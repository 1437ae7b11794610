"""localllm cache: list or clear the prefix cache and the n-gram files."""

from typing import TYPE_CHECKING, Literal

from localllm.cli.parameters import argument
from localllm.cli.terminal.output import say_dim, write
from localllm.cli.terminal.render import format_size, format_table, to_one_line

if TYPE_CHECKING:
    from localllm.files.cache.prefix_files import PrefixEntry


def cache(action: Literal["clear"] | None = argument("[clear]", "Remove all entries.")) -> None:
    """List or clear the prefix cache and the n-gram files.

    The prefix cache saves the KV cache of long prompts: a prompt that starts like an earlier one skips that part of
    the prefill. The n-gram files hold earlier texts, for speculative decoding. When the prefix cache exceeds 4 GB, the
    least recently used prompt is removed; LOCALLLM_PREFIX_GB, or cache_gb in config.toml, sets another limit, and 0
    turns the cache off.

    Examples:
      localllm cache
      localllm cache clear
    """
    from localllm.files.cache import ngram_cache_file as written_file
    from localllm.files.cache import prefix_files

    if action == "clear":
        say_dim(f"{format_size(prefix_files.remove_all() + written_file.remove_all())} removed")
        return
    entries, texts = prefix_files.list_entries(), written_file.list_files()
    if not entries and not texts:
        say_dim("the cache is empty")
        return
    rows = [
        *list_prompts(entries),
        *(("texts", str(tokens), format_size(nbytes), format_time(when)) for tokens, nbytes, when in texts),
    ]
    rows += [("all", "", format_size(sum(entry.size for entry in entries) + sum(nbytes for _, nbytes, _ in texts)), "")]
    write("\n".join(format_table(("model", "tokens", "size", "last used"), rows)) + "\n")


def list_prompts(entries: "list[PrefixEntry]") -> list[tuple[str, str, str, str]]:
    """Build a row for each prompt, latest first; a shared prefix counts for the latest prompt only."""
    by_key, continued = {entry.key: entry for entry in entries}, {entry.about.before for entry in entries}
    rows, visited = [], set[str]()
    for last in sorted(entries, key=lambda entry: -entry.used):
        if last.key in continued:
            continue
        nbytes, key = 0, last.key
        while key in by_key and key not in visited:
            nbytes += by_key[key].size
            visited.add(key)
            key = by_key[key].about.before
        rows.append((to_one_line(last.about.model), str(last.about.end), format_size(nbytes), format_time(last.used)))
    return rows


def format_time(seconds: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
