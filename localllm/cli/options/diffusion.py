"""Options of `localllm run` for diffusion models, with llama.cpp's names, and their answers."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli.options.sampling import number
from localllm.cli.options.shared import GenerationGroup
from localllm.cli.parameters import explicit_options, group
from localllm.cli.terminal.output import ProgressLine, say
from localllm.cli.terminal.render import page_of_stdout
from localllm.errors import UsageError
from localllm.generation.sampling.declaration import names_for
from localllm.generation.sampling.options import OPTIONS, SamplingOptions

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.diffusion import DiffusionOptions
    from localllm.text.messages import Message

PLACES, EPSILON = 128, 1e-3  # defaults: tokens of the answer, smallest timestep


@group
class Diffusion:
    """Diffusion language models."""

    steps: Annotated[int | None, number("--diffusion-steps", help="Number of denoising steps.  [default: 128]")] = None
    epsilon: Annotated[
        float | None, number("--diffusion-eps", help="Timestep schedule: smallest timestep.  [default: 0.001]")
    ] = None
    block_length: Annotated[
        int | None,
        number(
            "--diffusion-block-length",
            help="Block schedule instead: unmask blocks of N tokens in turn.  [default: 0, off]",
        ),
    ] = None
    algorithm: Annotated[
        int | None,
        number(
            "--diffusion-algorithm",
            help="How to choose the positions to unmask: 0 origin, 1 entropy, 2 margin, 3 random, 4 confidence."
            "  [default: 4]",
        ),
    ] = None
    algorithm_temperature: Annotated[
        float | None,
        number("--diffusion-alg-temp", help="Temperature for choosing which positions to unmask.  [default: 0, off]"),
    ] = None
    guidance: Annotated[
        float | None, number("--diffusion-cfg-scale", help="Classifier-free guidance scale.  [default: 0, off]")
    ] = None
    has_noise: Annotated[
        bool, typer.Option("--diffusion-add-gumbel-noise", help="Add Gumbel noise to the logits if --temp is above 0.")
    ] = False
    visual: Annotated[bool, typer.Option("--diffusion-visual", help="Print the text after each step to stderr.")] = (
        False
    )

    def as_fields(self) -> dict[str, Any]:
        """Return the given options by field of DiffusionOptions."""
        return {name: value for name, value in explicit_options(self).items() if name != "visual"}


def fill(
    model_opened: "Model",
    asked: "str | list[Message]",
    choices: GenerationGroup,
    diffusion: Diffusion,
    line: ProgressLine,
) -> None:
    """Generate with a diffusion model: print the progress on `line`, and the answer to stdout at the end.

    Raises UsageError for other models, ContextError.
    """
    from localllm.engine.run import BATCH
    from localllm.generation.diffusion import denoise, diffusion_model, require_room

    model, options = (
        diffusion_model(model_opened.engine, model_opened.file.metadata),
        diffusion_options(choices, diffusion),
    )
    if isinstance(asked, str):
        prompt = model_opened.tokenizer.encode(asked, special=True, bos=True)
    else:
        prompt = model_opened.session.encode_chat(asked)
    require_room(len(prompt) + options.length, min(BATCH, model_opened.context))
    text = ""
    try:
        for step, tokens in enumerate(denoise(model, prompt, options), start=1):
            text = decode_with_blanks(model_opened, tokens, model.mask)
            if diffusion.visual:
                line.clear()
                say(f"{step}/{options.steps} {text}")
            line.show(f"{step}/{options.steps} {' '.join(text.split())}")
    finally:
        line.clear()
    out = page_of_stdout()
    out.push(text)
    out.end()


def diffusion_options(choices: GenerationGroup, diffusion: Diffusion) -> "DiffusionOptions":
    """Build DiffusionOptions from the options. Raises UsageError."""
    from localllm.generation.diffusion import DiffusionOptions

    fields = diffusion.as_fields()
    if not fields.get("block_length"):
        fields.setdefault("epsilon", EPSILON)
    usual, supported = SamplingOptions(**choices.drawing()).complete, names_for("diffusion", OPTIONS)
    if unsupported := choices.drawing().keys() - supported.keys():
        raise UsageError(f"diffusion models do not support {min(unsupported).replace('_', '-')}")
    if choices.ban:
        raise UsageError("diffusion models do not support ban: they do not write from left to right")
    length = PLACES if choices.max_tokens in (None, -1) else choices.max_tokens
    options = DiffusionOptions(length=length, **fields, **{name: getattr(usual, name) for name in supported})
    options.require_valid()
    return options


def decode_with_blanks(model: "Model", tokens: list[int], mask: int) -> str:
    """Decode the tokens up to the end token; masked positions are shown as underscores."""
    tokenizer, text, run = model.tokenizer, "", list[int]()
    for token in tokens:
        if token in tokenizer.end_ids:
            break
        if token == mask:
            text, run = text + tokenizer.decode(run) + "_", []
        else:
            run.append(token)
    return text + tokenizer.decode(run)
