# Sourced by the other scripts: goes to the project's root and gives them its Python environment, .venv.
#
#   prepare_environment        localllm, installed in place: edits take effect at once
#   prepare_environment dev    the same, and the tools for working on it
#   $python                    the environment's Python
#
# A second run changes nothing: each kind of installation leaves a note of the folder and the pyproject.toml it was made
# from, and is made again when they differ.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python

say() { printf '%s\n' "$*" >&2; }

is_suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Runs a command without a word, unless it fails.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 </dev/null || { status=$?; cat "$log" >&2; }
    rm -f "$log"
    return "$status"
}

create_environment() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if is_suitable "$candidate"; then
            say "Creating the environment .venv with $("$candidate" --version) ..."
            quietly "$candidate" -m venv --clear .venv
            return
        fi
    done
    say "localllm needs Python 3.11 or newer, and none was found: install it from https://www.python.org/downloads/"
    return 1
}

prepare_environment() {
    local extra=${1:-} made_from
    made_from=$(pwd && cat pyproject.toml)
    is_suitable "$python" || create_environment
    if [ "$(cat ".venv/installed-$extra" 2>/dev/null)" != "$made_from" ]; then
        say "Installing localllm and what it needs (once; takes about a minute) ..."
        quietly "$python" -m pip install --disable-pip-version-check --editable ".${extra:+[$extra]}"
        printf '%s\n' "$made_from" | tee ".venv/installed-$extra" >.venv/installed-
    fi
}
