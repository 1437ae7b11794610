"""The examples on the pages: the program accepts every command line, and what needs no real model or network runs."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from adapters import random_adapter, write_adapter
from models import write_model
from project import ROOT

from localllm.cli.app import make_context
from localllm.files.gguf.file import GGUFFile
from localllm.system.files import get_cache_folder
from tests.integration.test_shell_idioms import environment_of, folder, tiny  # noqa: F401

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.glob("*.md")) if not page.name.startswith("shell")),  # whose blocks all run
    *sorted((DOCS / "python").glob("*.md")),
]
BLOCK = re.compile(r"^( *)```+(bash|console)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
# Programs of the examples that must do nothing here; tail would wait for more.
STUBS = ["curl", "docker", "git", "journalctl", "pip", "python", "python3", "systemctl", "tail"]
STUB = """\
#!/bin/sh
if [ "${0##*/}" = localllm ]; then
    printf "%s\\0" "$@" >> "calls.$$"  # a file for each process: those of a pipe run at once
    printf "\\1" >> "calls.$$"
fi
"""
WRONG = "--tmep"  # an example of a mistake
LEFT_OUT = (  # beginnings of lines that need a terminal, the network, a server, minutes or a real model
    "localllm chat", "localllm fit", "localllm pull", "localllm serve", "tail -f", "pip install",
)  # fmt: skip
RUN = {  # pages whose blocks run, and more beginnings of lines that do not
    "README.md": (),
    "configuration.md": (),
    "constrained.md": (),
    "context.md": ("localllm run qwen2.5-7b --rope-scaling",),  # a model without windows
    "embed.md": ("localllm quantize", "localllm embed clip.gguf"),  # a checkpoint, images
    "gguf-files.md": ("localllm merge",),  # 45 GB
    "map.md": ("jq -Rc", "localllm map model.gguf questions.jsonl -o answers.jsonl --ray"),  # images, Ray
    "perplexity.md": ("localllm quantize big.gguf files/",),  # minutes
    "sampling.md": (),
    "search.md": ("localllm search docs --mcp",),  # a client
    "speculation.md": (),
    "troubleshooting.md": (),
    "what-runs.md": ("localllm run mistral-7b",),  # a template that needs the tokens of Mistral
}
FILES = {
    "docs/decisions/draft-heads.md": "EAGLE heads are used when a file has one.\n",
    "app.log": "disk full\n", "book.txt": "Anna went to sea.\n", "questions.jsonl": '{"prompt": "Hi"}\n',
    "reviews.txt": "Fine.\n", "prompt.txt": "Who wrote {title}?\n", "invoices.jsonl": '{"text": "12 crowns"}\n',
    "invoice.json": '{"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}',
    "person.json": '{"type": "object", "properties": {"name": {"enum": ["Anna"]}}, "required": ["name"]}',
    "sentences.txt": "A cat sleeps.\nA cat sleeps.\n", "report.txt": "A report.\n",
    "calibration.txt": "The sea was calm. " * 900, "tinyshakespeare.txt": "The sea was calm. " * 9000,
    "docs/map.md": "# Resume\n\nA map that was interrupted resumes.\n",
    "notes/c.txt": "With my pension I take the ferry.\n",
}  # fmt: skip


def commands_of(page: Path) -> list[list[str]]:
    """Return the command lines of each block, without what console blocks show as output."""
    blocks = []
    for indent, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = [line.removeprefix(indent) for line in code.split("\n")]
        if language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        blocks.append([line for line in re.sub(r"\\\n", "\\\n", "\n".join(lines)).split("\n") if WRONG not in line])
    return blocks


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_the_program_accepts_every_command_line(page: Path, tmp_path: Path):
    """Run the blocks in Bash with a program that records its arguments, and let localllm parse them."""
    blocks = commands_of(page)
    (tmp_path / "bin").mkdir()
    for name in [*STUBS, "localllm"]:
        (tmp_path / "bin" / name).write_text(STUB)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("notes", "photos", "localllm", "home", "home/.config/fish/completions"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("notes.txt", "notes/a.txt", "countries.txt", "books.csv"):
        (tmp_path / name).write_text("France\n")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "MODEL": "m.gguf",
    }
    for lines in blocks:
        code = "fpath=(home home)\n" + "\n".join(lines)
        subprocess.run(["bash", "-c", code], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, timeout=60,
                       capture_output=True)  # fmt: skip
    calls = [call for path in tmp_path.rglob("calls.*") for call in path.read_text(encoding="utf-8").split("\1")[:-1]]
    assert len(calls) >= sum(line.startswith("localllm ") for lines in blocks for line in lines)
    for call in calls:
        name, *words = call.split("\0")[:-1]
        context = make_context(name)
        context.command.parse_args(context, words)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_documented_examples_run_without_errors(name: str, folder: Path):  # noqa: F811
    """Replace models by tiny ones, and skip blocks that need a server, a client or the network."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(text)
    write_model("bert", folder / "minilm.gguf")
    write_model("bert_rank", folder / "bge-reranker.gguf")
    small = "SmolLM2-135M-Instruct-Q4_1"
    for copy in ("big", "base", "model-F16", "model-Q4_K_M", "My-Model-F16", "SmolLM2-F32", small):
        (folder / f"{copy}.gguf").hardlink_to(folder / "model.gguf")
    with GGUFFile.open(folder / "model.gguf") as file:
        for adapter in ("poet", "judge"):
            write_adapter(random_adapter(file, ["blk.0.attn_q.weight"]), folder / f"{adapter}.gguf", 1.0)
    names = dict.fromkeys(("qwen3-4b", "qwen3-8b", "qwen3-0.6b", "MODEL"), "model.gguf")
    names["nomic-embed-text-1.5"] = "minilm.gguf"
    (folder / "CONFIG" / "localllm").mkdir(parents=True)
    aliases = "".join(f'"{alias}" = "{folder / file}"\n' for alias, file in names.items())
    (folder / "CONFIG" / "localllm" / "config.toml").write_text(f"[aliases]\n{aliases}[defaults]\nmax-tokens = 20\n")
    home = folder / "home"
    (home / ".config" / "fish" / "completions").mkdir(parents=True)
    environment = {**environment_of(folder), "HOME": str(home), "LOCALLLM_CACHE": str(get_cache_folder())}
    for lines in commands_of(DOCS / name):
        left = [line for line in lines if not line.startswith((*LEFT_OUT, *RUN[name]))]
        command = ["bash", "-e", "-o", "pipefail", "-c", "\n".join(["fpath=(home home)", *left])]
        done = subprocess.run(command, cwd=folder, timeout=300, env=environment, stdin=subprocess.DEVNULL,
                              capture_output=True)  # fmt: skip
        assert done.returncode in (0, 7), (left, done.stderr.decode(errors="replace"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["configuration.md", "llama-cpp-options.md"])
def test_messages_are_those_of_the_program(name: str, folder: Path):  # noqa: F811
    """A command in a console block, run with a tiny model, prints the lines of localllm that the block shows."""
    text = (DOCS / name).read_text(encoding="utf-8")
    shown = re.findall(r"^\$ (localllm [^\n]*)\n(localllm: [^\n]*)", text, re.MULTILINE)
    assert shown
    for command, message in shown:
        done = subprocess.run(["bash", "-c", f"{command} -n 4"], cwd=folder, env=environment_of(folder), timeout=300,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")  # fmt: skip
        assert message in done.stderr.splitlines()
