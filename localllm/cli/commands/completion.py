"""localllm completion: print a shell's completion script, and answer its queries.

The script runs the program with COMPLETE in the environment and the words up to the cursor as arguments. The first line
of the output is what else the shell may offer: "models" (files *.gguf and folders), "files" or "nothing"; each other
line is a word, a tab, and its description.
"""

import os
from collections.abc import Sequence
from typing import Literal

import typer

from localllm.cli.command import Command
from localllm.cli.options.shared import DRAFT
from localllm.cli.parameters import Parameter, argument
from localllm.cli.registry import (
    COMMANDS,
    COMPLETE,
    HELP_NAMES,
    build_command,
    get_summary,
    load_function,
    require_command,
)
from localllm.cli.terminal.output import write

Word = tuple[str, str]

BASH = """\
_localllm() {
    local kind word meaning current="${COMP_WORDS[COMP_CWORD]}" words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    COMPREPLY=()
    {
        read -r kind
        while IFS=$'\\t' read -r word meaning; do
            # inside an open quote nothing is escaped; bash itself escapes names of files
            [[ $kind == nothing && $current != [\\"\\']* ]] && printf -v word %q "$word"
            COMPREPLY+=("$word")
        done
    } < <(%VARIABLE%=bash localllm "${words[@]//[\\\\\\"\\']/}" 2>/dev/null)
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
# PowerShell before 7.3 passes no empty words to programs, so the script appends a dot to the word to complete.
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
    shell: Literal["bash", "zsh", "fish", "powershell"] = argument("SHELL", "bash, zsh, fish or powershell."),
) -> None:
    """Print a shell completion script.

    It completes commands, options and their values, model names and aliases, and files.

    Examples:
      localllm completion bash >> ~/.bashrc
      localllm completion zsh > "${fpath[1]}/_localllm"
      localllm completion fish > ~/.config/fish/completions/localllm.fish
      localllm completion powershell >> $PROFILE
    """
    write(SCRIPTS[shell].replace("%VARIABLE%", COMPLETE))


def print_completions(words: Sequence[str]) -> None:
    """Print the completions of the last word for the shell's script, or nothing if earlier words are invalid."""
    from localllm.errors import LocalllmError

    if os.environ.get(COMPLETE) == "powershell":
        words = [*words[:-1], words[-1].removesuffix(".")]
    try:
        kind, candidates = complete_word(words[:-1], words[-1] if words else "")
    except LocalllmError:
        return
    write("".join(f"{line}\n" for line in (kind, *(f"{word}\t{meaning}" for word, meaning in candidates))))


def complete_word(words_before: Sequence[str], prefix: str) -> tuple[str, list[Word]]:
    """Return the completions of a partial word: the type of files, and words with their descriptions.

    Raises LocalllmError if the words before it are invalid.
    """
    if not words_before:
        return "nothing", [
            *filter_by_prefix(prefix, [(name, get_summary(name)) for name in COMMANDS]),
            *(filter_by_prefix(prefix, [("--help", ""), ("--version", "")]) if prefix.startswith("-") else []),
        ]
    require_command(words_before[0])
    command = build_command(load_function(words_before[0]), Command)
    context = typer.Context(command, info_name=words_before[0], help_option_names=HELP_NAMES)
    params = command.get_params(context)
    options = {name: param for param in params for name in param.names}
    words_before = drop_equals(words_before)  # bash makes three words of --name=value
    prefix = "" if prefix == "=" else prefix
    name, equals, value = prefix.partition("=")
    if equals and (option := options.get(name)) and not option.is_switch:
        kind, words = list_values(option, context, value)
        return kind, [(f"{name}={word}", meaning) for word, meaning in words]
    if (option := options.get(words_before[-1])) and not option.is_switch:
        return list_values(option, context, prefix)
    if prefix.startswith("-"):
        names = command.shell_complete(context, prefix)
        return "nothing", filter_by_prefix(
            prefix, [(each.value, (each.help or "").partition("  [")[0]) for each in names]
        )
    arguments, place = [param for param in params if param.is_argument], count_arguments(words_before[1:], options)
    if not arguments or (place >= len(arguments) and not arguments[-1].takes_several):
        return "nothing", []
    return list_values(arguments[min(place, len(arguments) - 1)], context, prefix)


def drop_equals(words: Sequence[str]) -> list[str]:
    """Remove the "=" between an option and its value."""
    return [
        word for index, word in enumerate(words) if word != "=" or not index or not words[index - 1].startswith("-")
    ]


def count_arguments(words_before: Sequence[str], options: dict[str, Parameter]) -> int:
    """Count the arguments typed so far."""
    count, remaining = 0, list(words_before)
    while remaining:
        word = remaining.pop(0)
        if word.startswith("-"):
            if (param := options.get(word)) and not param.is_switch:
                remaining = remaining[1:]
        else:
            count += 1
    return count


def list_values(param: Parameter, context: typer.Context, prefix: str) -> tuple[str, list[Word]]:
    """Return the values of an option or argument: its choices, or those of its callback."""
    words = [(each.value, each.help or "") for each in param.shell_complete(context, prefix)]
    return get_file_type(param, [word for word, _ in words]), filter_by_prefix(prefix, words)


def get_file_type(param: Parameter, words: Sequence[str]) -> str:
    """Return which files a value may name: "models", "files" or "nothing"."""
    metavar = param.metavar or ""
    if "MODEL" in metavar or DRAFT in words:
        return "models"
    if "IN" in metavar.split() or "FILE" in metavar or metavar == "DIR":
        return "files"
    offers = param.choices or param.type_descriptor.parameter_info.autocompletion
    return "files" if param.is_argument and not offers else "nothing"


def filter_by_prefix(prefix: str, words: Sequence[Word]) -> list[Word]:
    """Return the words that begin with the partial word."""
    return [(word, " ".join(meaning.split())) for word, meaning in words if word.startswith(prefix)]
