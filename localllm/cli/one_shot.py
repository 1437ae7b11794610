"""Implement `localllm run`, from its options to the answer on stdout."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, cast

from localllm.cli import open_model as opening
from localllm.cli.options import shared as options
from localllm.cli.options.choices import print_choice, split_choices
from localllm.cli.options.conflicts import DIFFUSION, FORM, STEPS, THOUGHTS, require_compatible
from localllm.cli.options.diffusion import DiffusionFlags, run_diffusion
from localllm.cli.options.one_shot import (
    EndpointFlags,
    FollowUpFlags,
    ImageFlags,
    InfillFlags,
    OutputFlags,
    PromptFlags,
    TemplateFlags,
    ToolFlags,
    encode_infill,
)
from localllm.cli.options.shared import require_complete
from localllm.cli.parameters import find_explicit_options
from localllm.cli.prompt_input import (
    PromptInputs,
    build_prompt,
    explain_overflow,
    read_prompt,
    sort_arguments,
    start_answer,
)
from localllm.cli.terminal import output as terminal
from localllm.cli.terminal.output import ProgressLine, say, to_json_line, write
from localllm.cli.terminal.render import print_stream, require_answers
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.follow_up import FollowUp
    from localllm.cli.long_prompt import PromptShortener
    from localllm.cli.terminal.tool_calls import ToolCallRunner
    from localllm.generation.beam_search import Answer
    from localllm.generation.options import GenerationOptions
    from localllm.generation.scheduler import Generation
    from localllm.services.receipts import AnswerSettings
    from localllm.services.remote.http import Endpoint
    from localllm.text.messages import Message


class AnsweredPrompt(NamedTuple):
    """The answers to a prompt.

    Attributes:
        answers: most likely first.  messages: tool calls, their results and the answer; [] without tools.
        interrupted: whether the user interrupted the answer.
    """

    answers: "list[Generation] | list[Answer]"
    messages: "list[Message]"
    interrupted: bool


@dataclass(repr=False, eq=False)
class OneShot:
    """A run of `localllm run`: its options by group, and its steps."""

    model: str | None
    words: list[str] | None
    prompt: PromptFlags
    output: OutputFlags
    engine: options.EngineFlags
    generation: options.GenerationFlags
    named: TemplateFlags
    follow: FollowUpFlags
    tools: ToolFlags
    images: ImageFlags
    infill: InfillFlags
    endpoint: EndpointFlags
    diffusion: DiffusionFlags

    def run(self) -> None:
        """Generate, print and save the answer. Raises LocalllmError, and KeyboardInterrupt on Ctrl-C."""
        self.started, self.line = perf_counter(), ProgressLine()
        self.place = self.endpoint.parse_endpoint()
        require_compatible(self.flags)
        earlier = self.open_conversation()
        self.warn_unattached((inputs := self.read()).question)
        longer = self.make_shortener()
        suffix = self.infill.read_suffix(self.prompt.encoding, self.compute_max_bytes)
        system = options.read_system_message(self.prompt.system, self.prompt.system_file)
        generation = options.build_generation_options(opening.make_prefill_progress(self.line), self.generation)
        texts = self.read_choices()
        if self.place is None:
            opening.warn_builtin_model(self.model)
        with ExitStack() as stack:
            if earlier is not None:
                stack.enter_context(earlier)
            calls = self.tools.open_tools(stack)
            model = self.open(self.place, stack)
            generation = opening.open_draft_model(model, generation, self.generation.speculate)
            opening.check_thinking(model, generation.think)
            can_shift = self.output.n == 1 and not (self.output.beams or texts)
            stack.enter_context(explain_overflow(model, can_shift, can_ask_parts=not self.is_raw))
            generation = self.complete_options(generation, model)
            load_s = perf_counter() - self.started
            text = inputs.text
            if longer is not None:
                text = longer.fit(model, inputs.material, inputs.question, system, generation)
            has_begun = earlier is not None and earlier.has_messages
            first = [] if has_begun else opening.get_first_messages(self.model, self.place is not None)
            prompt = self.images.add_images(build_prompt(model, text, system, self.is_raw, first))
            prompt = prompt if earlier is None else earlier.append_question(prompt)
            if texts:
                return print_choice(model, prompt, texts, self.output.as_json)
            if model.is_diffusion or self.has_diffusion_options:
                require_compatible(self.flags | {DIFFUSION: True})
                return run_diffusion(model, prompt, self.generation, self.diffusion, self.line)
            if calls:
                generation = calls.begin(model, generation, stack)
                answered = self.answer_with_tools(model, prompt, generation, calls)
            else:
                asked = prompt if suffix is None else encode_infill(model, text, suffix)
                answered = self.answer(model, asked, generation)
            self.report(model, prompt, generation, answered, load_s)
            if not (self.is_search or self.is_raw):
                save_conversation(model, earlier, prompt, answered, self.prompt.no_cache)
            if answered.interrupted:
                raise KeyboardInterrupt
            opening.finish_writes(model)
            if longer is not None:
                longer.finish()
            require_complete(generation, [answer.finish_reason for answer in answered.answers])
            require_answers(answered.answers)

    @property
    def is_raw(self) -> bool:
        """Return whether the prompt is plain text, without a chat template."""
        return self.prompt.raw or bool(find_explicit_options(self.infill))

    @property
    def has_diffusion_options(self) -> bool:
        """Return whether options of diffusion models are set that change the answer."""
        return bool(find_explicit_options(self.diffusion).keys() - {"visual"})

    @property
    def is_search(self) -> bool:
        return self.output.n > 1 or self.output.beams > 0

    @property
    def extracts_code(self) -> bool:
        return self.follow.extract or self.follow.extract_last

    def open_conversation(self) -> "FollowUp | None":
        """Open the conversation of --continue or --session; use its model if none is given. Raises UsageError."""
        earlier = None
        if self.follow.latest or self.follow.session is not None:
            from localllm.cli.follow_up import FollowUp

            earlier = FollowUp(self.follow.session)
            self.model = earlier.model if self.model is None and self.place is None else self.model
        ask = self.prompt
        inputs = (self.model, self.words, ask.prompt, ask.file, ask.binary_file, self.place)
        if all(each is None for each in inputs) and self.named.template is not None:
            raise UsageError(f"MODEL is missing: localllm run MODEL --template {self.named.template}")
        if all(each is None for each in inputs):
            raise UsageError("MODEL and the prompt are missing: localllm run MODEL -p TEXT")
        return earlier

    def compute_max_bytes(self) -> int:
        """Return how many bytes of UTF-8 the prompt may have; sys.maxsize if the context is unknown."""
        if self.place:
            return opening.get_unlimited()
        return opening.compute_max_bytes(
            opening.default_to_builtin(self.model), self.engine, self.generation.on_overflow
        )

    def read(self) -> PromptInputs:
        """Read the prompt from the command line, files and stdin. Raises UsageError, ContextError."""
        ask = self.prompt
        texts, self.files = sort_arguments(self.words or (), ask.file or ())
        inputs = read_prompt(
            [*texts, *(ask.prompt or ())],
            self.files,
            not (ask.no_stdin or self.images.takes_stdin),
            ask.encoding,
            self.compute_max_bytes,
            ask.binary_file,
            with_names=not (ask.no_names or self.is_raw),
        )._replace(prompt_first=ask.prompt_first or self.is_raw)
        return inputs if self.named.template is None else fill_template(self.named, inputs)

    def make_shortener(self) -> "PromptShortener | None":
        """Return a PromptShortener if --on-overflow shortens prompts, else None. Raises UsageError."""
        if self.generation.on_overflow not in options.SHORTENING_METHODS:
            return None
        from localllm.cli.long_prompt import PromptShortener

        return PromptShortener(self.generation.on_overflow, self.is_raw)

    def read_choices(self) -> list[str]:
        """Return the texts of --choices, or []. Raises UsageError, also for invalid answer counts."""
        output = self.output
        if output.n != 1 or output.beams:
            validate_combination(output.n, output.beams, self.generation)
        return [] if output.choices_given is None else split_choices(output.choices_given)

    @property
    def flags(self) -> dict[str, object]:
        """The options that exclude others, and whether each is set."""
        output, ask, follow = self.output, self.prompt, self.follow
        return {
            "--continue": follow.latest, "--session": follow.session is not None, "--extract": self.extracts_code,
            "-sys": ask.system is not None or ask.system_file is not None, "--raw": ask.raw,
            "--chat-template": ask.chat_template is not None, "--suffix": find_explicit_options(self.infill),
            "--image": self.images.image_files, "--tools": self.tools.is_enabled, "--n": output.n > 1,
            "--beams": output.beams > 0, "--choices": output.choices_given is not None, "--json": output.as_json,
            "--stats": output.stats, "--receipt": output.receipt is not None, "--endpoint": self.place is not None,
            STEPS: self.has_diffusion_options, FORM: self.generation.shape.forms,
            THOUGHTS: find_explicit_options(self.generation.thoughts),
        }  # fmt: skip

    def open(self, place: "Endpoint | None", stack: ExitStack) -> "Model":
        """Open the model, or connect to the server at `place`. Raises LocalllmError."""
        template, mmproj, pan_and_scan = self.prompt.chat_template, self.images.mmproj, self.images.pan_and_scan
        if place is None:
            path, no_cache = opening.default_to_builtin(self.model), self.prompt.no_cache
            return stack.enter_context(opening.open_model(path, self.engine, template, no_cache, mmproj, pan_and_scan))
        from localllm.cli.options.one_shot import open_remote

        refused = {"chat_template": template, "mmproj": mmproj, "pan_and_scan": pan_and_scan}
        model: Model = open_remote(place, self.model, self.generation, self.engine, **refused)
        return model

    def warn_unattached(self, question: str) -> None:
        """Say that images whose paths are in the prompt are not sent, as they are in `chat`."""
        from localllm.cli.interactive.dropped_files import find_images

        if not self.images.image_files and (paths := find_images(question).paths):
            say(f"localllm: {paths[0]} is not sent as an image: use --image {paths[0]}")

    def complete_options(self, generation: "GenerationOptions", model: "Model") -> "GenerationOptions":
        """Return the options; complete them for --receipt, so that the answer can be reproduced. Raises UsageError."""
        if self.output.receipt is None:
            return generation
        files = (*self.files, self.prompt.binary_file)
        return prepare_options(self.output.receipt, generation, model, files, self.output.force)

    def answer_with_tools(
        self, model: "Model", prompt: "str | list[Message]", generation: "GenerationOptions", calls: "ToolCallRunner"
    ) -> AnsweredPrompt:
        from localllm.cli.terminal.tool_calls import answer_with_tools

        assert not isinstance(prompt, str)
        thoughts = not self.output.hide_thinking
        answer, messages, interrupted = answer_with_tools(
            model, prompt, generation, calls, self.line, self.output.as_json, thoughts
        )
        return AnsweredPrompt([answer], messages, interrupted)

    def answer(
        self, model: "Model", prompt: "str | list[int] | list[Message]", options_here: "GenerationOptions"
    ) -> AnsweredPrompt:
        """Print an answer as it is generated; print several answers at the end."""
        output, last = self.output, self.follow.extract_last
        if self.is_search:
            with self.line:
                answers = model.session.candidates(prompt, options_here, output.n, output.beams)
            if not output.as_json:
                texts = [answer.text for answer in answers]
                if self.extracts_code:
                    from localllm.cli.terminal.stream_renderer import extract_or_all

                    texts = [extract_or_all(each, last) for each in texts]
                write("\n\n".join(texts) + "\n")
            return AnsweredPrompt(answers, [], False)
        generation, out = start_answer(model, prompt, options_here), None
        if self.extracts_code:
            from localllm.cli.terminal.stream_renderer import make_code_page

            out = make_code_page(generation, last)
        thoughts = not output.hide_thinking
        interrupted = print_stream(generation, self.line, silent=output.as_json, thoughts=thoughts, out=out)
        return AnsweredPrompt([generation], [], interrupted)

    def report(
        self,
        model: "Model",
        prompt: "str | list[Message]",
        generation: "GenerationOptions",
        answered: AnsweredPrompt,
        load_s: float,
    ) -> None:
        """Print the JSON of --json and the timings of --stats, and write the receipt."""
        output = self.output
        if not (output.as_json or output.stats or output.receipt is not None):
            return
        from localllm.cli.terminal.result_report import build_report, print_stats  # seldom needed

        result = build_report(model, answered.answers, self.is_search, load_s, perf_counter() - self.started)
        if output.as_json:
            write(to_json_line({**result, "messages": answered.messages} if self.tools.is_enabled else result))
        if output.stats:
            print_stats(result)
        if output.receipt is not None:
            choices: AnswerSettings = {"n": output.n, "beams": output.beams, "speculate": self.generation.speculate,
                                "chat_template": self.prompt.chat_template}  # fmt: skip
            write_receipt(output.receipt, model, prompt, generation, choices, result)


def save_conversation(
    model: "Model", earlier: "FollowUp | None", prompt: "str | list[Message]", answered: AnsweredPrompt, no_cache: bool
) -> None:
    """Save a question and its only answer in the session, and for --continue unless --no-cache is given."""
    answer = cast("Generation", answered.answers[0])
    if isinstance(prompt, str) or not answer.text:
        return
    from localllm.services import last_answer

    messages = last_answer.append_answer(prompt, answered.messages[:-1], answer)
    if not no_cache and (warning := last_answer.save_conversation(model, messages)):
        opening.warn([warning])
    if earlier is not None:
        earlier.save(model, messages)


def fill_template(named: TemplateFlags, inputs: PromptInputs) -> PromptInputs:
    """Fill a template with the prompt and the --field values. Raises UsageError."""
    from localllm.services.prompt_templates import load_template, parse_fields

    assert named.template is not None
    template, fields = load_template(named.template), parse_fields(named.field or ())
    if template.has_input:
        return PromptInputs("", template.fill(inputs.text, fields))
    material, question = (inputs.material, inputs.question) if inputs.material else (inputs.question, "")
    return PromptInputs(material, "\n\n".join(filter(None, (template.fill("", fields), question))), inputs.prompt_first)


def validate_combination(n: int, beams: int, choices: options.GenerationFlags) -> None:
    """Raise UsageError for invalid answer counts, and for beams with sampling options."""
    from localllm.generation.beam_search import require_counts

    require_counts(n, beams)
    if options.is_draft_model(choices.speculate):
        raise UsageError("a draft model works for a single answer only: leave out --n and --beams, or --speculate")
    drawing = choices.get_sampling()
    if beams and drawing:
        raise UsageError(f"{next(iter(drawing))} cannot be combined with --beams, which does not sample: leave it out")


def prepare_options(
    path: str, options: "GenerationOptions", model: "Model", inputs: Iterable[str | None], force: bool
) -> "GenerationOptions":
    """Return options that reproduce the answer. Raises UsageError for a receipt that cannot be written.

    inputs: files of the prompt. The receipt must not replace these, a file of the model, or, unless forced, any file
    that is not a receipt.
    """
    from localllm.files.safe_file import resolve_target
    from localllm.services import remote_receipts as remote
    from localllm.services.outputs import is_receipt, require_replaceable
    from localllm.services.receipts import fill_options, serialize_options

    resolve_target(path, (*(model.files if model.file else ()), *(name for name in inputs if name is not None)))
    require_replaceable(path, is_receipt, "a receipt", force)
    options = fill_options(model, options) if model.file else remote.add_seed(options)
    serialize_options(options)
    return options


def write_receipt(
    path: str,
    model: "Model",
    prompt: "str | list[Message]",
    options: "GenerationOptions",
    choices: "AnswerSettings",
    result: dict[str, object],
) -> None:
    """Write the receipt; choices: n, beams, speculate and chat_template."""
    from localllm.services import receipts
    from localllm.services import remote_receipts as remote

    if model.file is None:
        remote_model: object = model
        return receipts.write_receipt(path, remote.make_receipt(remote_model, prompt, options, choices["n"], result))
    terminal.end_output()  # hashing the model may take a while
    with ProgressLine() as line:
        receipts.write_receipt(
            path, receipts.make_receipt(model, prompt, options, choices, result, opening.make_hash_progress(line))
        )
