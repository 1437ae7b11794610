"""Options of `localllm run` for diffusion models, with llama.cpp's names, and the function that runs such models."""

from typing import TYPE_CHECKING, Any

from localllm.cli.options.shared import GenerationFlags
from localllm.cli.parameters import find_explicit_options, option, option_group
from localllm.cli.terminal.output import ProgressLine, say
from localllm.cli.terminal.render import make_stdout_page
from localllm.errors import UsageError
from localllm.generation.sampling.options import OPTIONS, SamplingOptions, map_names

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.diffusion import DiffusionOptions
    from localllm.text.messages import Message

PLACES, EPSILON = 128, 1e-3  # defaults: tokens of the answer, smallest timestep


@option_group("Diffusion language models")
class DiffusionFlags:
    """Options of `run` for diffusion models."""

    steps: int | None = option("--diffusion-steps", "Denoise in N steps.  [default: 128]", "N")
    epsilon: float | None = option(
        "--diffusion-eps", "Set the smallest timestep of the timestep schedule.  [default: 0.001]", "N"
    )
    block_length: int | None = option(
        "--diffusion-block-length",
        "Unmask blocks of N tokens in turn, instead of the timestep schedule.  [default: 0, off]",
        "N",
    )
    algorithm: int | None = option(
        "--diffusion-algorithm",
        "Choose the positions to unmask by: 0 origin, 1 entropy, 2 margin, 3 random, 4 confidence.  [default: 4]",
        "N",
    )
    algorithm_temperature: float | None = option(
        "--diffusion-alg-temp", "Set the temperature for choosing the positions to unmask.  [default: 0, off]", "N"
    )
    guidance: float | None = option(
        "--diffusion-cfg-scale", "Set the scale of classifier-free guidance.  [default: 0, off]", "N"
    )
    has_noise: bool = option("--diffusion-add-gumbel-noise", "Add Gumbel noise to the logits if --temp is above 0.")
    visual: bool = option("--diffusion-visual", "Print the text after each step to stderr.")

    def to_fields(self) -> dict[str, Any]:
        """Return the options that were set, as fields of DiffusionOptions."""
        return {name: value for name, value in find_explicit_options(self).items() if name != "visual"}


def run_diffusion(
    model_opened: "Model",
    asked: "str | list[Message]",
    choices: GenerationFlags,
    diffusion: DiffusionFlags,
    line: ProgressLine,
) -> None:
    """Generate with a diffusion model: print the progress on `line`, and the final answer to stdout.

    Raises UsageError for other models, ContextError.
    """
    from localllm.engine.runs import BATCH
    from localllm.generation.diffusion import denoise, make_diffusion_model, require_room

    model, options = (
        make_diffusion_model(model_opened.engine, model_opened.file.metadata),
        build_diffusion_options(choices, diffusion),
    )
    if isinstance(asked, str):
        prompt = model_opened.tokenizer.encode(asked, special=True, bos=True)
    else:
        prompt = model_opened.session.encode_chat(asked)
    require_room(len(prompt) + options.length, min(BATCH, model_opened.context))
    text = ""
    with line:
        for step, tokens in enumerate(denoise(model, prompt, options), start=1):
            text = decode_with_blanks(model_opened, tokens, model.mask)
            if diffusion.visual:
                line.clear()
                say(f"{step}/{options.steps} {text}")
            line.show(f"{step}/{options.steps} {' '.join(text.split())}")
    out = make_stdout_page()
    out.push(text)
    out.end()


def build_diffusion_options(choices: GenerationFlags, diffusion: DiffusionFlags) -> "DiffusionOptions":
    """Build DiffusionOptions from the options. Raises UsageError."""
    from localllm.generation.diffusion import DiffusionOptions

    fields = diffusion.to_fields()
    if not fields.get("block_length"):
        fields.setdefault("epsilon", EPSILON)
    usual, supported = SamplingOptions(**choices.get_sampling()).complete, map_names("diffusion", OPTIONS)
    if unsupported := choices.get_sampling().keys() - supported.keys():
        raise UsageError(f"diffusion models do not support {min(unsupported).replace('_', '-')}: leave it out")
    if choices.ban:
        raise UsageError("diffusion models do not generate from left to right, so cannot ban strings: leave out --ban")
    length = PLACES if choices.max_tokens in (None, -1) else choices.max_tokens
    options = DiffusionOptions(length=length, **fields, **{name: getattr(usual, name) for name in supported})
    options.require_valid()
    return options


def decode_with_blanks(model: "Model", tokens: list[int], mask: int) -> str:
    """Decode the tokens up to the end token; show masked positions as underscores."""
    tokenizer, text, run = model.tokenizer, "", list[int]()
    for token in tokens:
        if token in tokenizer.end_ids:
            break
        if token == mask:
            text, run = text + tokenizer.decode(run) + "_", []
        else:
            run.append(token)
    return text + tokenizer.decode(run)
