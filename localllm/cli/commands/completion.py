"""localllm completion: what the shell completes when Tab is pressed, and how it comes to ask.

The script of a shell runs the program with COMPLETE in the environment and the words up to the cursor as arguments. The
first line of the answer is what else the shell may offer: "models" (files *.gguf and folders), "files" or "nothing";
each other line is a word, a tab, and what the word means.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Literal

from localllm.cli.parameters import Parameter, argument
from localllm.cli.registry import COMMANDS, COMPLETE, params_of, summary
from localllm.cli.terminal.output import write

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
# PowerShell before 7.3 gives programs no empty words: a dot is behind the one that is begun.
POWERSHELL = """\
Register-ArgumentCompleter -Native -CommandName localllm -ScriptBlock {
    param($begun, $command, $cursor)
    $before = @($command.CommandElements | Select-Object -Skip 1 |
        Where-Object { $_.Extent.EndOffset -lt $cursor } | ForEach-Object { "$_" })
    $env:%VARIABLE% = 'powershell'
    try { $lines = @(localllm @before "$begun." 2>$null) } finally { Remove-Item Env:%VARIABLE% }
    foreach ($line in ($lines | Select-Object -Skip 1)) {
        $word, $meaning = $line -split "`t", 2
        if (-not $meaning) { $meaning = $word }
        [System.Management.Automation.CompletionResult]::new($word, $word, 'ParameterValue', $meaning)
    }
    if ($lines[0] -eq 'models' -or $lines[0] -eq 'files') {
        $folder = if ($begun -match '^(.*[\\/])') { $Matches[1] } else { '' }
        Get-ChildItem -Path "$begun*" -ErrorAction SilentlyContinue |
            Where-Object { $_.PSIsContainer -or $lines[0] -eq 'files' -or $_.Extension -eq '.gguf' } |
            ForEach-Object {
                $path = $folder + $_.Name
                if ($path.Contains(' ')) { $path = "'" + $path + "'" }
                [System.Management.Automation.CompletionResult]::new($path, $_.Name, 'ProviderItem', $_.FullName)
            }
    }
}
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH, "powershell": POWERSHELL}


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish", "powershell"], argument("SHELL", "bash, zsh, fish or powershell.")],
) -> None:
    """Print a script with which a shell completes what is typed.

    Commands, options and their values, aliases of models, files.

    Examples:
      localllm completion bash >> ~/.bashrc
      localllm completion zsh > "${fpath[1]}/_localllm"
      localllm completion fish > ~/.config/fish/completions/localllm.fish
      localllm completion powershell >> $PROFILE
    """
    write(SCRIPTS[shell].replace("%VARIABLE%", COMPLETE))


def answer(words: Sequence[str]) -> None:
    """Tell the shell's script what could stand where the last of the words begins; nothing if something is wrong."""
    from localllm.errors import LocalllmError

    if os.environ.get(COMPLETE) == "powershell":
        words = [*words[:-1], words[-1].removesuffix(".")]
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
            *starting(begun, [(name, summary(name)) for name in COMMANDS]),
            *starting(begun, [("--help", ""), ("--version", "")], "-"),
        ]
    if before[0] == "help":
        return "nothing", starting(begun, [(name, "") for name in COMMANDS])
    params = params_of(before[0])
    options = {name: param for param in params for name in param.names}
    before = without_equals(before)  # bash makes three words of --name=value
    begun = "" if begun == "=" else begun
    name, equals, value = begun.partition("=")
    if equals and (asked := options.get(name)) and not asked.is_flag:
        kind, found = of_value(asked, value, before[0])
        return kind, [(f"{name}={word}", meaning) for word, meaning in found]
    if (asked := options.get(before[-1])) and not asked.is_flag:
        return of_value(asked, begun, before[0])
    if begun.startswith("-"):
        words = [(name, help_of(param)) for name, param in options.items()]
        return "nothing", starting(begun, words)
    arguments, place = [param for param in params if param.is_argument], place_of(before[1:], options)
    if not arguments or (place >= len(arguments) and not arguments[-1].many):
        return "nothing", []
    return of_value(arguments[min(place, len(arguments) - 1)], begun, before[0])


def without_equals(words: Sequence[str]) -> list[str]:
    """Words less the "=" between an option and its value."""
    return [
        word for place, word in enumerate(words) if word != "=" or not place or not words[place - 1].startswith("-")
    ]


def place_of(before: Sequence[str], options: dict[str, Parameter]) -> int:
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


def of_value(param: Parameter, begun: str, command: str) -> tuple[str, list[Word]]:
    """The values that an option or argument may have."""
    if words := values_of(param):
        return "models" if words[-1] == "draft:" else "nothing", starting(begun, [(str(word), "") for word in words])
    if command == "config" and param.name == "command":
        return "nothing", starting(begun, [("path", ""), *((name, summary(name)) for name in COMMANDS)])
    if command == "sessions":
        from localllm.services.sessions import names

        return "nothing", starting(begun, [(name, "") for name in names()])
    if command == "quantize" and param.is_argument:
        from localllm.quant.recipes import RECIPES

        return "files", starting(begun, [(name, "") for name in RECIPES], begun[:1] or "?")
    if param.is_argument and param.metavar.strip("[].") == "MODEL":
        return "models", starting(begun, models(known=command in ("pull", "fit")))
    if param.is_argument or "FILE" in param.metavar or param.metavar == "DIR":
        return "files", []
    return "nothing", []


def values_of(param: Parameter) -> Sequence[str]:
    """The words that an option may have as its value, if they are few."""
    if param.name == "chat_template":
        from localllm.text.builtin_templates import BUILTIN_TEMPLATES

        return [*BUILTIN_TEMPLATES]
    return param.choices or param.declared.values


def models(known: bool) -> list[Word]:
    """Names of models, with what they stand for: the user's, those on the disk, and if wanted those that are known.

    Without those that have a colon, where bash begins a new word.
    """
    from localllm.files.settings import load_settings
    from localllm.services.catalogue import known_models, models_on_disk

    names: dict[str, str] = {}
    if known:
        names |= {name: model.description for name, model in known_models().items()}
    names |= {model.name: str(model.path) for model in models_on_disk() if ":" not in model.name}
    return sorted((names | dict(load_settings().aliases)).items())


def starting(begun: str, words: Sequence[Word], needed: str = "") -> list[Word]:
    """Those that go on from what is begun; only if that begins with what is needed."""
    if not begun.startswith(needed):
        return []
    return [(word, " ".join(meaning.split())) for word, meaning in words if word.startswith(begun)]


def help_of(param: Parameter) -> str:
    return param.help.partition("  [")[0]
