"""localllm run: one answer on stdout, then the end."""

from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import open_model as opening
from localllm.cli.options import generation as asking
from localllm.cli.options import shared as options
from localllm.cli.options.choices import Choices, choose, texts_of
from localllm.cli.options.choices import require_plain as require_plain_choices
from localllm.cli.options.constraint import HideThinking, require_whole
from localllm.cli.options.diffusion import Diffusion, fill, require_plain
from localllm.cli.options.endpoint import EndpointGroup
from localllm.cli.options.follow_up import FollowUpGroup, TemplateGroup
from localllm.cli.options.images import ImageGroup
from localllm.cli.options.infill import InfillGroup
from localllm.cli.options.infill import encode as encode_infill
from localllm.cli.options.tools import ToolGroup
from localllm.cli.prompt_input import Encoding, Given, Prompt, begin, naming_ways, read_prompt, request
from localllm.cli.receipt import keep, prepare_options
from localllm.cli.terminal.output import ProgressLine, write
from localllm.cli.terminal.render import stream
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.follow_up import Thread
    from localllm.generation.beam_search import Answer
    from localllm.generation.generate import GenerationOptions
    from localllm.text.marker_escaping import Message


def run(
    model: options.OptionalModelName = None,
    words: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="Prompt, in quotes.")] = None,
    *,
    prompt: Prompt = None,
    file: Annotated[
        list[str] | None,
        typer.Option("-f", "--file", metavar="FILE", help="File to add to the prompt; - is stdin.  [repeatable]"),
    ] = None,
    binary_file: Annotated[
        str | None,
        typer.Option(
            "-bf", "--binary-file", metavar="FILE", help="File to add to the prompt with its final line break."
        ),
    ] = None,
    system: options.System = None,
    system_file: options.SystemFile = None,
    chat_template: options.ChatTemplate = None,
    encoding: Encoding = None,
    no_stdin: Annotated[bool, typer.Option("--no-stdin", help="Do not read stdin.")] = False,
    no_names: Annotated[
        bool, typer.Option("--no-names", help="Do not put its name before the text of each of several files.")
    ] = False,
    prompt_first: Annotated[
        bool, typer.Option("--prompt-first", help="Put the prompt before files and stdin, not after them.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")
    ] = False,
    choices_given: Choices = None,
    as_json: options.AsJson = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print timings to stderr.")] = False,
    receipt: Annotated[
        str | None,
        typer.Option(
            "--receipt",
            metavar="FILE",
            help="Write a receipt, from which `localllm replay` generates the answer again.",
        ),
    ] = None,
    force: options.Force = False,
    hide_thinking: HideThinking = False,
    n: Annotated[
        int,
        typer.Option(
            "--n", metavar="N", help="Sample N answers, most likely first; -n is the length in tokens.  [default: 1]"
        ),
    ] = 1,
    beams: Annotated[
        int, typer.Option("--beams", metavar="N", help="Beam search with N beams.  [default: 0, off]")
    ] = 0,
    engine: options.EngineGroup,
    no_cache: options.NoCache = False,
    choices: options.GenerationGroup,
    named: TemplateGroup,
    follow: FollowUpGroup,
    tools: ToolGroup,
    images: ImageGroup,
    infill: InfillGroup,
    endpoint: EndpointGroup,
    diffusion: Diffusion,
) -> None:
    """Answer one prompt.

    Files and text from a pipe are put before the prompt, with a blank line between. Only the answer goes to stdout. The
    model's thinking is shown dim on stderr, if stderr is a terminal. Several answers are separated by blank lines.

    Examples:
      localllm run model.gguf "Why is the sky blue?"
      cat notes.txt | localllm run model.gguf -p "Summarize this:" -n 100
      localllm run model.gguf -f letter.txt -sys "Translate into French." --temp 0
      localllm run --continue -p "And into German?"
      git diff --staged | localllm run model.gguf --template commit
      localllm run model.gguf -x -p "A script that counts files." > a.sh
      localllm run model.gguf -p "Once upon a time" --raw --stats
      localllm run model.gguf -p "A name for a cat?" --n 3 --json | jq -r ".answers[].text"
      localllm run model.gguf -p "Invent a person." --json-schema person.json | jq .name
      localllm run --endpoint http://127.0.0.1:8000 -p "Why is the sky blue?"
      localllm run model.gguf -p "What is in notes.txt?" --tools read_file --allow .
      localllm run model.gguf -p "What is this?" --image photo.jpg
      localllm run model.gguf -p "Is this kind? Thanks!" --choices yes,no --json
      localllm run coder.gguf -p "def add(a, b):" --suffix "    return c" -n 20
      localllm run model.gguf -p "Is water wet?" --grammar 'root ::= "yes" | "no"'
    """
    started = perf_counter()
    place = endpoint.place()
    thread = None
    if follow.latest or follow.session is not None:
        thread = open_thread(follow, raw or infill.has_suffix, n > 1 or beams > 0, choices_given is not None)
        model = thread.model if model is None and place is None else model
    if model is words is prompt is file is binary_file is place is None:
        raise UsageError("there is neither a model nor a question: give both, as in `localllm run MODEL -p TEXT`")
    path = opening.model_or_builtin(model)
    most_bytes = opening.unknown if place else partial(opening.most_bytes, path, engine, choices.on_overflow)
    asked_first = [*filter(None, (words,)), *(prompt or ())]
    use_stdin = not (no_stdin or images.takes_stdin)
    given = read_prompt(
        asked_first, file or (), use_stdin, encoding, most_bytes, binary_file,
        prompt_first=prompt_first or raw or infill.has_suffix, with_names=not (no_names or raw or infill.has_suffix),
    )  # fmt: skip
    if named.template is not None:
        given = with_template(named, given)
    text, longer = given.text, None
    if choices.on_overflow in asking.CUTS:
        from localllm.cli.long_prompt import LongPrompt

        longer = LongPrompt(choices.on_overflow, raw or infill.has_suffix)
    suffix = infill.text(encoding, most_bytes)
    system = asking.system_message(system, system_file)
    line = ProgressLine()
    chosen = asking.generation_options(opening.reading(line), choices)
    if raw or infill.has_suffix:
        require_no_template("--raw" if raw else "--suffix", system, chat_template, choices)
    infill.require_plain(
        raw=raw, images=bool(images.image_files), tools=tools.are_enabled, choices=choices_given is not None,
        endpoint=place is not None, receipt=receipt is not None, steps=bool(diffusion.as_fields()),
    )  # fmt: skip
    if n != 1 or beams:
        require_sense(n, beams, choices)
    images.require_plain(receipt=receipt is not None)
    if tools.are_enabled:
        require_plain_tools(raw=raw, n=n > 1, beams=beams > 0, receipt=receipt is not None)
    texts = [] if choices_given is None else texts_of(choices_given)
    if texts:
        require_plain_choices(
            n=n > 1, beams=beams > 0, tools=tools.are_enabled, endpoint=place is not None, receipt=receipt is not None,
            stats=stats, steps=bool(diffusion.as_fields()), a_schema_grammar_or_regex=chosen.constraint is not None,
        )  # fmt: skip
    if place is None:
        opening.tell_choice(model)
    if (extracts := follow.extract or follow.extract_last) and (as_json or tools.are_enabled):
        raise UsageError(f"--extract cannot be combined with {'--json' if as_json else '--tools'}")
    with ExitStack() as stack:
        if thread is not None:
            stack.enter_context(thread)
        calls = tools.open_tools(stack)
        if place is None:
            opened = stack.enter_context(opening.open_model(path, engine, chat_template, no_cache, **images.seeing()))
        else:
            from localllm.cli.options.endpoint import open_remote as opened_there

            opened = opened_there(place, model, choices, engine, chat_template=chat_template, **images.seeing())
        chosen = opening.with_draft_model(opened, chosen, choices.speculate)
        stack.enter_context(naming_ways(opened, can_shift=n == 1 and not (beams or texts)))
        if receipt is not None:
            chosen = prepare_options(receipt, chosen, opened, (*(file or ()), binary_file), force)
        load_s = perf_counter() - started
        if longer is not None:
            text = longer.fit(opened, given.material, given.question, system, chosen)
        asked, interrupted = images.shown(request(opened, text, system, raw or infill.has_suffix)), False
        asked = asked if thread is None else thread.with_question(asked)
        continued = asked if suffix is None else encode_infill(opened, text, suffix)
        if texts:
            return choose(opened, asked, texts, as_json)
        if opened.is_diffusion or diffusion.as_fields():
            images.require_plain(steps=True)
            infill.require_plain(a_diffusion_model=True)
            require_plain(
                n=n > 1,
                beams=beams > 0,
                json=as_json,
                stats=stats,
                receipt=receipt is not None,
                tools=tools.are_enabled,
            )
            return fill(opened, asked, choices, diffusion, line)
        answers: list[Any]
        said: list[Message] = []
        if calls:
            from localllm.cli.terminal.tool_calls import answer_with_tools

            assert not isinstance(asked, str)
            chosen = calls.begin(opened, chosen, stack)
            answer, said, interrupted = answer_with_tools(
                opened, asked, chosen, calls, line, as_json, not hide_thinking
            )
            answers = [answer]
        elif n > 1 or beams:
            answers = several(opened, continued, chosen, n, beams, line)
            if not as_json:
                texts_said = [answer.text for answer in answers]
                if extracts:
                    from localllm.cli.terminal.extracted import code_or_all

                    texts_said = [code_or_all(each, follow.extract_last) for each in texts_said]
                write("\n\n".join(texts_said) + "\n")
        else:
            answers, out = [begin(opened, continued, chosen)], None
            if extracts:
                from localllm.cli.terminal.extracted import make_code_page

                out = make_code_page(answers[0], follow.extract_last)
            interrupted = stream(answers[0], line, silent=as_json, thoughts=not hide_thinking, out=out)
        if as_json or stats or receipt is not None:
            from localllm.cli.terminal.result_report import as_line, report, tell  # seldom needed

            result = report(opened, answers, bool(n > 1 or beams), load_s, perf_counter() - started)
            if as_json:
                write(as_line({**result, "messages": said} if calls else result))
            if stats:
                tell(result)
            if receipt is not None:
                kinds = {"n": n, "beams": beams, "speculate": choices.speculate, "chat_template": chat_template}
                keep(receipt, opened, asked, chosen, kinds, result)
        if not (n > 1 or beams or raw or infill.has_suffix):
            remember(opened, thread, asked, said[:-1], answers[0], no_cache)
        if interrupted:
            raise KeyboardInterrupt
        opening.settle(opened)
        if longer is not None:
            longer.finish()
        require_whole(chosen, [answer.finish_reason for answer in answers])


def require_no_template(
    option: str, system: str | None, chat_template: str | None, choices: options.GenerationGroup
) -> None:
    """Raise UsageError for options that need a chat template, which an option turns off."""
    others = {
        "-sys": system is not None,
        "--chat-template": chat_template is not None,
        "the options for thinking and template variables": not choices.thoughts.are_usual,
    }
    for other, is_given in others.items():
        if is_given:
            raise UsageError(f"{option} turns off the chat template: leave out {other}")


def open_thread(follow: FollowUpGroup, raw: bool, several: bool, choices: bool) -> "Thread":
    """Return the conversation of --continue or --session. Raises UsageError."""
    if follow.latest and follow.session is not None:
        raise UsageError("give either --session or --continue, not both")
    option = "--continue" if follow.latest else "--session"
    for other, is_given in {"--raw or --suffix": raw, "several answers": several, "--choices": choices}.items():
        if is_given:
            raise UsageError(f"{option} cannot be combined with {other}")
    from localllm.cli.follow_up import Thread

    return Thread(follow.session)


def remember(
    model: "Model",
    thread: "Thread | None",
    asked: "str | list[Message]",
    between: "list[Message]",
    answer: Any,
    no_cache: bool,
) -> None:
    """Keep a question and its answer in the session, and for --continue unless nothing is to stay on disk.

    between: tool calls and their results.
    """
    if isinstance(asked, str) or not answer.text:
        return
    from localllm.services import last_answer

    messages = last_answer.turn(asked, between, answer)
    if not no_cache:
        last_answer.keep(model, messages)
    if thread is not None:
        thread.save(model, messages)


def with_template(named: TemplateGroup, given: Given) -> Given:
    """Return the prompt that a template makes: what is asked about, and its text behind that. Raises UsageError."""
    from localllm.services.prompt_templates import fields_of, load

    assert named.template is not None
    template, fields = load(named.template), fields_of(named.field or ())
    if template.has_input:
        return Given("", template.fill(given.text, fields))
    material, more = (given.material, given.question) if given.material else (given.question, "")
    return Given(material, "\n\n".join(filter(None, (template.fill("", fields), more))), given.prompt_first)


def require_plain_tools(**given: bool) -> None:
    """Raise UsageError for options that cannot be combined with tools."""
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"tools cannot be combined with --{name}")


def require_sense(n: int, beams: int, choices: options.GenerationGroup) -> None:
    """Raise UsageError for invalid numbers of answers, and for beams with sampling options."""
    from localllm.generation.beam_search import require_counts

    require_counts(n, beams)
    if opening.is_draft_model(choices.speculate):
        raise UsageError("a draft model works for a single answer: leave out --n, --beams or --speculate")
    drawing = choices.drawing()
    if beams and drawing:
        raise UsageError(f"{next(iter(drawing))} cannot be combined with --beams: beam search does not sample")


def several(
    model: "Model",
    asked: "str | list[int] | list[Message]",
    chosen: "GenerationOptions",
    n: int,
    beams: int,
    line: ProgressLine,
) -> "list[Answer]":
    """Return the answers, most likely first, when all are finished."""
    try:
        return model.session.candidates(asked, chosen, n, beams)
    finally:
        line.clear()
