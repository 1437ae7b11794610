"""The options of run that fill in the middle of a text instead of answering a prompt."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.parameters import TYPED_ONLY, group
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model


@group
class InfillGroup:
    """Fill in the middle, for code models."""

    suffix: Annotated[
        str | None,
        typer.Option(
            "--suffix", metavar="TEXT", help="Text after the gap; the prompt is then the text before it, verbatim."
        ),
        TYPED_ONLY,
    ] = None
    suffix_file: Annotated[
        str | None,
        typer.Option("-sf", "--suffix-file", metavar="FILE", help="File with the text after the gap."),
        TYPED_ONLY,
    ] = None

    @property
    def has_suffix(self) -> bool:
        return self.suffix is not None or self.suffix_file is not None

    def require_plain(self, **options: bool) -> None:
        """Raise UsageError for options that cannot be combined with a suffix."""
        for name, is_used in options.items():
            if self.has_suffix and is_used:
                raise UsageError(f"--suffix cannot be combined with {name.replace('_', ' ')}")

    def text(self, encoding: str | None, most_bytes: Callable[[], int]) -> str | None:
        """Return the text after the gap, None without these options. Raises UsageError, ContextError.

        most_bytes: as of read_prompt.
        """
        from localllm.cli.prompt_input import content, require_decodable, text_of

        if self.suffix_file is None:
            return None if self.suffix is None else require_decodable(self.suffix, "--suffix")
        if self.suffix is not None:
            raise UsageError("give either --suffix or -sf, not both")
        return text_of(content(self.suffix_file, most_bytes, encoding), self.suffix_file, encoding, whole=True)


def encode(model: "Model", prefix: str, suffix: str) -> list[int]:
    """Return the prompt's token ids. Raises UsageError for a model that cannot fill in."""
    from localllm.generation.infill import Infill

    return Infill(prefix, suffix).encode(model.tokenizer)
