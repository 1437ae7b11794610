# Sourced by the other scripts: goes to the project's root and gives them its Python environment, .venv.
#
#   prepare_environment [EXTRA]    see scripts/environment.py
#   $python                        the environment's Python
#   $any_python                    one that is new enough to make it

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
case "$(uname -s)" in MINGW* | MSYS* | CYGWIN*) python=.venv/Scripts/python.exe ;; esac # Git's shell on Windows

say() { printf '%s\n' "$*" >&2; }

# Runs a command without a word, unless it fails.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 </dev/null || { status=$?; cat "$log" >&2; }
    rm -f "$log"
    return "$status"
}

for any_python in python3 python3.14 python3.13 python3.12 python3.11 python ""; do
    if [ -z "$any_python" ]; then
        say "localllm needs Python 3.11 or newer, and none was found: install it from https://www.python.org/downloads/"
        exit 1
    fi
    "$any_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
done

prepare_environment() { "$any_python" scripts/environment.py prepare "${1:-}"; }
