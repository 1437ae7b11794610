"""localllm ask: answer a question from files, with citations."""

from localllm.cli import open_model as opening
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_models
from localllm.cli.options.search import FileFilterFlags, SearchModelFlags, SearchPaths, Threshold
from localllm.cli.parameters import option
from localllm.cli.terminal.output import ProgressLine, say, write
from localllm.errors import UsageError


def ask(
    paths: SearchPaths = None,
    *,
    model: str | None = option("-m --model", "Answer with this model.", "MODEL", autocompletion=offer_models),
    query: str | None = option("-p --prompt", "Ask this question; all arguments are then files or folders.", "TEXT"),
    top: int = option("-k --top", "Answer from the N best passages.  [default: 8]", "N", default=8),
    threshold: Threshold = None,
    system: options.System = None,
    files: FileFilterFlags,
    models: SearchModelFlags,
    engine: options.EngineFlags,
    no_cache: options.NoCache = False,
    choices: options.GenerationFlags,
) -> None:
    """Answer a question from files, and cite the passages.

    Searches as `localllm search` does, gives the model the best passages, and prints below the answer which of them it
    cites, with file and line.

    Examples:
      localllm ask docs "how do I resume a map?" -m qwen3-4b
      localllm ask src "where are passwords checked?" -m qwen3-4b --embedder minilm.gguf
    """
    from localllm.cli.options.search import split_question
    from localllm.cli.terminal.render import print_stream, require_answers
    from localllm.services.search.answers import build_prompt, list_citations

    if model is None and paths and len(paths) > 1 and paths[0].endswith(".gguf"):
        model, *paths = paths  # as the other commands have it
    places, question = split_question(paths or (), query, "ask")
    if model is None:
        raise UsageError("MODEL is missing: name a model with -m MODEL, or in config.toml")
    line = ProgressLine()
    generation = options.build_generation_options(opening.make_prefill_progress(line), choices)
    with opening.open_search(places, files, models, engine.threads, engine.device) as found_search:
        hits = found_search.find(question, top, threshold)
    if not hits:
        raise UsageError(f"no passage in {', '.join(places)} matches the question")
    with opening.open_model(model, engine, None, no_cache) as model_opened:
        generation = opening.open_draft_model(model_opened, generation, choices.speculate)
        opening.check_thinking(model_opened, generation.think)
        text, passages = build_prompt([hit.passage for hit in hits], question, model_opened)
        instruction = [] if system is None else [{"role": "system", "content": system}]
        answer = model_opened.session.chat([*instruction, {"role": "user", "content": text}], generation)
        if print_stream(answer, line):
            raise KeyboardInterrupt
        if len(passages) < len(hits):
            say(
                f"localllm: only {len(passages)} of {len(hits)} passages fit the context of "
                f"{model_opened.context} tokens"
            )
        write("".join(f"{line}\n" for line in ["", *list_citations(answer.text, passages)]))
        opening.finish_writes(model_opened)
        require_answers([answer])
