"""localllm run: answer one prompt."""

import sys

from localllm.cli.one_shot import OneShot
from localllm.cli.options import shared as options
from localllm.cli.options.diffusion import DiffusionGroup
from localllm.cli.options.one_shot import (
    EndpointGroup,
    FollowUpGroup,
    ImageGroup,
    InfillGroup,
    OutputGroup,
    PromptGroup,
    TemplateGroup,
    ToolGroup,
)
from localllm.cli.parameters import argument, find_explicit_options
from localllm.cli.terminal.output import is_terminal, set_plain

OF_CONVERSATIONS = (
    "system",
    "system_file",
    "chat_template",
    "encoding",
    "no_cache",
)  # options that a conversation has, too


def run(
    model: options.OptionalModelName = None,
    words: list[str] | None = argument("[TEXT]", "Prompt, in quotes."),
    *,
    prompt: PromptGroup,
    output: OutputGroup,
    engine: options.EngineGroup,
    generation: options.GenerationGroup,
    named: TemplateGroup,
    follow: FollowUpGroup,
    tools: ToolGroup,
    images: ImageGroup,
    infill: InfillGroup,
    endpoint: EndpointGroup,
    diffusion: DiffusionGroup,
) -> None:
    """Answer one prompt.

    Files and text from a pipe are put before the prompt, with a blank line between. Only the answer goes to stdout. The
    model's thinking is shown dim on stderr, if stderr is a terminal. Several answers are separated by blank lines.
    Without a prompt, on a terminal, it begins a conversation as `chat` does.

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
    set_plain(output.plain)
    one_shot = OneShot(
        model, words, prompt, output, engine, generation, named, follow, tools, images, infill, endpoint,
        diffusion,
    )  # fmt: skip
    if not begins_conversation(one_shot):
        return one_shot.run()
    from localllm.cli.commands.chat import ChatView, chat

    chat(
        model, system=prompt.system, system_file=prompt.system_file, chat_template=prompt.chat_template,
        encoding=prompt.encoding, engine=engine,
        look=ChatView(session=follow.session, stats=output.stats, plain=output.plain),
        no_cache=prompt.no_cache, choices=generation, tools=tools, images=images, endpoint=endpoint,
    )  # fmt: skip


def begins_conversation(one_shot: OneShot) -> bool:
    """Return whether to start a conversation: a terminal, no prompt, and no option of a single answer."""
    models = one_shot.model, one_shot.endpoint.endpoint, one_shot.follow.session
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)) or all(each is None for each in models):
        return False
    single = [
        *find_explicit_options(one_shot.prompt).keys() - {*OF_CONVERSATIONS, "no_names", "prompt_first"},
        *find_explicit_options(one_shot.output).keys() - {"stats", "force", "plain"},
        *find_explicit_options(one_shot.follow).keys() - {"session"},
        *(
            name
            for group in (one_shot.named, one_shot.infill, one_shot.diffusion)
            for name in find_explicit_options(group)
        ),
    ]
    return not (one_shot.words or single or one_shot.generation.on_overflow in options.SHORTENING_METHODS)
