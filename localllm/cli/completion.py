"""localllm completion: what the shell completes when Tab is pressed, and how it comes to ask.

The script of a shell runs the program with COMPLETE in the environment and the words up to the cursor as arguments. The
first line of the answer is what else the shell may offer: "models" (files *.gguf and folders), "files" or "nothing";
each other line is a word, a tab, and what the word means.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from localllm.cli.app import COMMANDS, COMPLETE, localllm, params_of
from localllm.cli.command import argument
from localllm.cli.terminal import write

Word = tuple[str, str]

BASH = """\
_localllm() {
    local kind word meaning current="${COMP_WORDS[COMP_CWORD]}" words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    COMPREPLY=()
    {
        read -r kind
        while IFS=$'\\t' read -r word meaning; do COMPREPLY+=("$word"); done
    } < <(%VARIABLE%=bash localllm "${words[@]}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    case $kind in
        models) compopt -o filenames
                while read -r word; do COMPREPLY+=("$word"); done < <(
                    compgen -f -X '!*.gguf' -- "$current"; compgen -d -- "$current") ;;
        files) compopt -o filenames
               while read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$current") ;;
    esac
}
complete -F _localllm localllm
"""
ZSH = """\
#compdef localllm
_localllm() {
    local kind line
    local -a lines words_and_meanings
    lines=("${(@f)$(%VARIABLE%=zsh localllm "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    kind=$lines[1]
    for line in "${(@)lines[2,-1]}"; do
        words_and_meanings+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
    done
    (( $#words_and_meanings )) && _describe -V localllm words_and_meanings
    case $kind in
        models) _files -g '*.gguf' ;;
        files) _files ;;
    esac
}
if [[ $funcstack[1] == _localllm ]]; then _localllm "$@"; else compdef _localllm localllm; fi
"""
FISH = """\
function __localllm_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l lines (env %VARIABLE%=fish localllm $words[2..-1] 2>/dev/null)
    printf '%s\\n' $lines[2..-1]
    switch $lines[1]
        case models
            __fish_complete_suffix .gguf | string match -r '^[^\\t]*(?:/|\\.gguf)(?:\\t.*)?$'
        case files
            __fish_complete_path (commandline -ct)
    end
end
complete -c localllm -f -a '(__localllm_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], argument("SHELL", "bash, zsh or fish.")]) -> None:
    """Print a script with which a shell completes what is typed.

    Commands, options and their values, aliases of models, files.

    Examples:
      localllm completion bash >> ~/.bashrc
      localllm completion zsh > "${fpath[1]}/_localllm"
      localllm completion fish > ~/.config/fish/completions/localllm.fish
    """
    write(SCRIPTS[shell].replace("%VARIABLE%", COMPLETE))


def answer(words: Sequence[str]) -> None:
    """Tell the shell's script what could stand where the last of the words begins; nothing if something is wrong."""
    from localllm.errors import LocalllmError

    try:
        kind, found = possible(words[:-1], words[-1] if words else "")
    except LocalllmError:
        return
    write("".join(f"{line}\n" for line in (kind, *(f"{word}\t{meaning}" for word, meaning in found))))


def possible(before: Sequence[str], begun: str) -> tuple[str, list[Word]]:
    """What could be instead of a word that is begun: the kind of files, and words with their meanings.

    Raises LocalllmError if what stands before makes no sense.
    """
    if not before:
        return "nothing", [
            *starting(begun, localllm.behind()),
            *starting(begun, [("--help", ""), ("--version", "")], "-"),
        ]
    if before[0] == "help":
        return "nothing", starting(begun, [(name, "") for name in COMMANDS])
    params = params_of(before[0])
    options = {name: param for param in params for name in (*param.opts, *param.secondary_opts) if name[:1] == "-"}
    if (asked := options.get(before[-1])) and not asked.is_flag:
        return of_value(asked, begun, before[0])
    if begun.startswith("-"):
        words = [(name, help_of(param)) for name, param in options.items()]
        return "nothing", starting(begun, words)
    arguments = [param for param in params if param.param_type_name == "argument"]
    return (
        of_value(arguments[min(place_of(before[1:], options), len(arguments) - 1)], begun, before[0])
        if arguments
        else ("nothing", [])
    )


def place_of(before: Sequence[str], options: dict[str, Any]) -> int:
    """How many arguments stand there already."""
    count, rest = 0, list(before)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            if (param := options.get(word)) and not param.is_flag:
                rest = rest[1:]
        else:
            count += 1
    return count


def of_value(param: Any, begun: str, command: str) -> tuple[str, list[Word]]:
    """The values that an option or argument may have."""
    if choices := param.type_descriptor.choices:
        return "nothing", starting(begun, [(str(choice), "") for choice in choices])
    if param.param_type_name == "argument" and param.metavar in ("MODEL", "[MODEL]"):
        return "models", starting(begun, models(known=command in ("pull", "fit")))
    if param.param_type_name == "argument" or "FILE" in (param.metavar or ""):
        return "files", []
    return "nothing", []


def models(known: bool) -> list[Word]:
    """Names of models, with what they stand for: the user's, those on the disk, and if wanted those that are known.

    Without those that have a colon, where bash begins a new word.
    """
    from localllm.files.settings import settings
    from localllm.services.catalogue import known_models, models_on_disk

    names: dict[str, str] = {}
    if known:
        names |= {name: model.description for name, model in known_models().items()}
    names |= {model.name: str(model.path) for model in models_on_disk() if ":" not in model.name}
    return sorted((names | dict(settings().aliases)).items())


def starting(begun: str, words: Sequence[Word], needed: str = "") -> list[Word]:
    """Those that go on from what is begun; only if that begins with what is needed."""
    if not begun.startswith(needed):
        return []
    return [(word, " ".join(meaning.split())) for word, meaning in words if word.startswith(begun)]


def help_of(param: Any) -> str:
    return (param.help or "").partition("  [")[0]
