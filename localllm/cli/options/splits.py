"""Options that divide a model among files."""

from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.options.sampling import number
from localllm.cli.parameters import group
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.quantizing.splitting import SplitLimits


@group
class SplitGroup:
    """Split files."""

    split_max_size: Annotated[
        str | None,
        typer.Option("--split-max-size", metavar="SIZE", help="Maximum size of a file's tensors, e.g. 45G or 800M."),
    ] = None
    split_max_tensors: Annotated[
        int | None, number("--split-max-tensors", help="Maximum number of tensors in a file.")
    ] = None
    no_tensor_first_split: Annotated[
        bool, typer.Option("--no-tensor-first-split", help="Write only metadata to the first file.")
    ] = False

    def limits(self) -> "SplitLimits | None":
        """Return the limits, None if there are none. Raises UsageError."""
        from localllm.quantizing.splitting import TENSORS, SplitLimits, parse_bytes

        tensors, nbytes = self.split_max_tensors, self.split_max_size
        if tensors is not None and nbytes is not None:
            raise UsageError("give either --split-max-size or --split-max-tensors, not both")
        if tensors is not None and tensors < 1:
            raise UsageError(f"--split-max-tensors should be 1 or above, not {tensors}")
        if nbytes is not None:
            return SplitLimits(0, parse_bytes(nbytes, "--split-max-size"), self.no_tensor_first_split)
        if tensors is None and not self.no_tensor_first_split:
            return None
        return SplitLimits(TENSORS if tensors is None else tensors, 0, self.no_tensor_first_split)
