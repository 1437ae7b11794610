"""Options that change a file's metadata."""

from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.parameters import group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from localllm.quantizing.metadata_edits import MetadataEdits


@group
class MetadataGroup:
    """Metadata."""

    set_metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--set-metadata",
            metavar="KEY=VALUE",
            help='Set a key, as text, number, bool or array: general.tags=\'["chat", "code"]\'. KEY=TYPE:VALUE names '
            "the type: u32, f32, bool, str, ..., str[].  [repeatable]",
        ),
    ] = None
    remove_metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--remove-metadata",
            metavar="KEY",
            help="Remove a key, or all keys that match a pattern with *.  [repeatable]",
        ),
    ] = None
    chat_template_file: Annotated[
        str | None,
        typer.Option("--chat-template-file", metavar="FILE", help="Chat template (Jinja) to write to the model."),
    ] = None

    def edits(self, packed: "Mapping[str, object]") -> "MetadataEdits":
        """Return the changes to this metadata. Raises UsageError, LocalllmError."""
        from localllm.quantizing.metadata_edits import resolve_edits

        return resolve_edits(self.set_metadata or (), self.remove_metadata or (), self.chat_template_file, packed)

    @property
    def is_empty(self) -> bool:
        return not (self.set_metadata or self.remove_metadata or self.chat_template_file)
