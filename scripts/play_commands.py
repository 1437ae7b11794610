#!/usr/bin/env python3
"""Record the answers of some 200 commands and calls, and compare them later.

Usage: play_commands.py record|play FILE [WORD ...].

Commands run within this process (exit code, standard output), Python calls tell token ids, a server tells its events.
A rebuilding of how answers are made should change none of them. WORDs choose cases by their names.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from models import write_model  # noqa: E402
from models.golden import prompt as tokens_of  # noqa: E402
from models.guessing import OWN, with_guess  # noqa: E402

import localllm  # noqa: E402
from localllm import api  # noqa: E402
from localllm.cli import main  # noqa: E402
from localllm.cli.terminal import output  # noqa: E402
from localllm.errors import LocalllmError  # noqa: E402
from localllm.generation.options import GenerationOptions  # noqa: E402
from localllm.generation.sampling.options import SamplingOptions  # noqa: E402

SMOL = ROOT.parent / "shared" / "models" / "smollm2-135m-instruct-q4_1.gguf"
KINDS = ("llama", "qwen3moe", "deepseek2_v3", "mamba2", "qwen35moe")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
          "required": ["name", "age"]}  # fmt: skip
GRAMMAR = 'root ::= ("yes" | "no" | "maybe") ", " [a-z]{3,12} "."'
QUESTIONS = ("How do I install localllm?", "What is a GGUF file?", "Stop an answer that is too long, please.")
COPY = "Say it again: one two three four five six seven. one two three four five six seven. one two three"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip
BIAS = {token: 12.0 for token in range(40, 46)}  # few tokens come, so that they come again
# What a JSON answer says of times, and of guesses that depend on them.
UNSTEADY = r'"(seconds|[a-z_]*_s|tokens_per_second|cached_tokens)": [0-9.e-]+|"(speculation|timings)": {[^}]*}'
Case = Callable[[], Any]


@contextlib.contextmanager
def caught() -> Iterator[list[bytes]]:
    """Catch what goes to standard output; standard error goes nowhere."""
    said = list[bytes]()
    with tempfile.TemporaryFile() as out, open(os.devnull, "wb") as nowhere:
        sys.stdout.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield said
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, before in zip((1, 2), kept, strict=True):
                os.dup2(before, number)
                os.close(before)
            out.seek(0)
            said.append(out.read())


def command(*words: object, stdin: str = "") -> Any:
    """Run a command line within this process."""
    sys.argv, sys.stdin = ["localllm", *map(str, words)], io.TextIOWrapper(io.BytesIO(stdin.encode()))
    code: Any = 0
    with caught() as said:
        try:
            main.main()
        except SystemExit as end:
            code = end.code
    return [code, re.sub(UNSTEADY, "", said[0].decode())]


def told(answer: Any) -> Any:
    """Return what an answer of the Python API says once it has been read to its end."""
    parts = [list(part) for part in answer.parts] if hasattr(answer, "parts") else []
    return [parts, answer.text, answer.thinking, answer.tokens, answer.finish_reason]


class Cases:
    """The models that are open for them, and the cases by their names."""

    def __init__(self, folder: Path):
        self._folder, self._open = folder, dict[str, api.Model]()
        self.of: dict[str, Case] = {}
        for add in (self.commands, self.commands_of_files, self.calls, self.long, self.speculation, self.sessions,
                    self.several, self.map, self.overflow, self.serve):  # fmt: skip
            add()

    def path(self, name: str) -> Path:
        """Return a tiny model's file, made when it is needed; "guide" is the built-in one, "smol" a real one."""
        if name in ("guide", "smol"):
            return Path(localllm.builtin_model()) if name == "guide" else SMOL
        path = self._folder / f"{name}.gguf"
        if not path.exists():
            write_mtp(path, name[4:]) if name.startswith("mtp-") else write_model(name, path)
        return path

    def model(self, name: str, context: int = 512) -> api.Model:
        key = f"{name} {context}"
        if key not in self._open:
            self._open[key] = api.open_model(self.path(name), 2, context, cache=name in ("guide", "smol"))
        return self._open[key]

    def close(self) -> None:
        for model in self._open.values():
            model.close()

    def prompt(self, name: str, number: int) -> Any:
        """Return a text for models that read some, token ids of which most come twice for tiny ones."""
        if name in ("guide", "smol"):
            return QUESTIONS[number % len(QUESTIONS)]
        some = tokens_of(name.removeprefix("mtp-"), 30)[number : number + 12]
        return [*some, 7, *some]

    def names(self) -> list[str]:
        return ["guide", *KINDS, *(["smol"] if SMOL.exists() else [])]

    def commands(self) -> None:
        how = {
            "greedy": ["--temp", 0], "seed": ["--seed", 3], "hot": ["--seed", 4, "--temp", 1.5, "--top-k", 0],
            "penalty": ["--seed", 5, "--repeat-penalty", 1.3], "mirostat": ["--seed", 6, "--mirostat", 2],
            "dry": ["--seed", 7, "--dry-multiplier", 0.8], "xtc": ["--seed", 8, "--xtc-probability", 0.5],
            "raw": ["--raw", "--temp", 0], "stop": ["--temp", 0, "--stop", "it"], "json": ["--json", "--seed", 1],
            "system": ["--temp", 0, "-sys", "Be short."], "n": ["--n", 3, "--seed", 9], "beams": ["--beams", 3],
            "schema": ["-j", json.dumps(SCHEMA), "--seed", 2], "regex": ["--regex", "[a-z]{4,9}!", "--seed", 2],
            "grammar": ["--grammar", GRAMMAR, "--seed", 2], "off": ["--speculate", "off", "--seed", 3],
            "ngram": ["--speculate", "ngram", "--seed", 3], "no-cache": ["--no-cache", "--seed", 3],
            "n-schema": ["--n", 2, "-j", json.dumps(SCHEMA), "--seed", 4], "none": ["--max-tokens", 0],
            "beams-n": ["--beams", 4, "--n", 2], "bad-n": ["--n", 0], "long": ["-c", 24, "--temp", 0],
            "full": ["-c", 64, "--raw", "--ignore-eos", "--temp", 0, "-n", 100],
        }  # fmt: skip
        for (name, words), question in itertools.product(how.items(), QUESTIONS[:2]):
            line = ["run", "-p", question, "-n", 40, *words]
            self.of[f"run {name} {question[:12]}"] = lambda line=line: command(*line)

    def commands_of_files(self) -> None:
        """Several questions at once, and a real model."""
        turns = "".join(f"{question}\n" for question in QUESTIONS)
        self.of["chat once"] = lambda: command("chat", "--temp", 0, "-n", 30, stdin=turns)
        if SMOL.exists():
            for name, words in {"greedy": ["--temp", 0], "n": ["--n", 2, "--seed", 1], "beams": ["--beams", 2]}.items():
                line = ["run", SMOL, "-p", COPY, "-n", 24, *words]
                self.of[f"run smol {name}"] = lambda line=line: command(*line)

    def calls(self) -> None:
        how: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0}, "seed": {"seed": 1}, "hot": {"seed": 2, "temperature": 1.4},
            "off": {"seed": 1, "speculate": "off"},
        }  # fmt: skip
        for name, (key, more) in itertools.product(self.names(), how.items()):
            for number in range(2):
                self.of[f"generate {name} {key} {number}"] = lambda name=name, number=number, more=more: told(
                    self.model(name).generate(self.prompt(name, number), 32, **more)
                )
        forms: dict[str, dict[str, Any]] = {"schema": {"schema": SCHEMA}, "regex": {"regex": "(ab|cd)+e"},
                                            "grammar": {"grammar": GRAMMAR}}  # fmt: skip
        for key, more in forms.items():
            for seed in range(2):
                self.of[f"chat {key} {seed}"] = lambda more=more, seed=seed: told(
                    self.model("guide").chat([{"role": "user", "content": QUESTIONS[seed]}], 60, seed=seed, **more)
                )
        for think, budget in (("on", 5), ("off", None), ("auto", 0), ("high", 12)):
            self.of[f"chat think {think} {budget}"] = lambda think=think, budget=budget: told(
                self.model("guide").chat(
                    [{"role": "user", "content": QUESTIONS[0]}], 40, seed=1, think=think, think_budget=budget
                )
            )

    def long(self) -> None:
        """Long prompts, whose prefill has several runs, twice and after a common beginning."""

        def asked(name: str) -> Any:
            model, some = self.model(name, 2048), [*map(int, tokens_of(name, 300))]
            prompts = [(some * 4)[:length] for length in (130, 513, 700, 1100)] + [some * 3 + some[:9], some * 3]
            alone = [told(model.generate(prompt, 8, temperature=0)) for prompt in [*prompts, prompts[2]]]
            among = [[one.text, one.tokens] for one in model.map(prompts, 8, temperature=0)]
            best = [[one.tokens, one.logprob] for one in model.candidates(prompts[3], 3, max_tokens=8, seed=1)]
            return [alone, among, best, [one.tokens for one in model.candidates(prompts[2], 2, 2, max_tokens=8)]]

        for name in KINDS:
            self.of[f"long {name}"] = lambda name=name: asked(name)

    def speculation(self) -> None:
        for number, how in itertools.product(range(3), ("off", "ngram", "auto", "draft")):
            self.of[f"speculate {how} {number}"] = lambda how=how, number=number: told(
                self.model("guide").generate(
                    COPY,
                    40,
                    seed=number,
                    temperature=0.7,
                    speculate=self.model("guide", 256) if how == "draft" else how,
                )
            )
            for name in ("llama", "mtp-" + OWN[0]):
                if how != "draft":
                    self.of[f"speculate {name} {how} {number}"] = lambda how=how, number=number, name=name: told(
                        self.model(name).generate(
                            self.prompt(name, number), 40, seed=number, logit_bias=BIAS, speculate=how
                        )
                    )

    def sessions(self) -> None:
        def turns(name: str, seed: int) -> Any:
            session, said = self.model(name, 256).session, list[Any]()
            session.clear()
            options = GenerationOptions(24, (), SamplingOptions(seed=seed))
            for question in QUESTIONS:
                said.append(told(session.ask(question, options)))
            session.undo()
            said.append(told(session.ask("Why?", options)))
            cut = session.ask("Tell me more.", options)
            said += [next(cut, None), next(cut, None)]
            cut.close()
            said.append(told(session.resume(options)))
            return [said, session.messages, session.forgotten]

        for name, seed in itertools.product(["guide", *(["smol"] if SMOL.exists() else [])], range(3)):
            self.of[f"session {name} {seed}"] = lambda name=name, seed=seed: turns(name, seed)

    def several(self) -> None:
        for name, n in itertools.product(["guide", "llama", "mamba2", "qwen35moe"], (1, 2, 5)):
            for beams in (0, n + 1):
                drawn = {} if beams else {"seed": 3}
                self.of[f"candidates {name} {n} {beams}"] = lambda name=name, n=n, beams=beams, drawn=drawn: [
                    [one.text, one.tokens, one.logprob, one.finish_reason, one.seed, one.thinking]
                    for one in self.model(name).candidates(self.prompt(name, 1), n, beams, 20, **drawn)
                ]  # fmt: skip

    def map(self) -> None:
        options: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0}, "seed": {"seed": 2}, "two": {"seed": 3, "parallel": 2},
            "fast": {"temperature": 0, "precise": False}, "hot": {"seed": 4, "temperature": 1.3, "max_tokens": 9},
        }  # fmt: skip
        for name, (key, more) in itertools.product(["guide", "llama", "qwen35moe"], options.items()):
            self.of[f"map {name} {key}"] = lambda name=name, more=more: [
                [one.text, one.tokens, one.finish_reason]
                for one in self.model(name).map(
                    [self.prompt(name, number) for number in range(6)], **{"max_tokens": 24, **more}
                )
            ]
        lines = "".join(f"{question}\n" for question in QUESTIONS * 2)
        for name, words in {
            "plain": [], "n": ["--n", 2], "schema": ["-j", json.dumps(SCHEMA)], "fast": ["--fast"], "raw": ["--raw"],
            "shortest": ["--shortest-first"], "n-regex": ["--n", 3, "--regex", "[a-z]{3,9}"],
        }.items():  # fmt: skip
            line = ["map", localllm.builtin_model(), "-n", 24, "--seed", 5, *words]
            self.of[f"map command {name}"] = lambda line=line: command(*line, stdin=lines)

    def overflow(self) -> None:
        for how, seed in itertools.product(("shift", "drop-turns", "error"), range(2)):
            self.of[f"overflow {how} {seed}"] = lambda how=how, seed=seed: told(
                self.model("guide", 192).chat(
                    [{"role": "user", "content": QUESTIONS[0]}], 260, seed=seed, ignore_eos=True, on_overflow=how
                )
            )
        line = ["run", "--on-overflow", "shift", "-c", 160, "-n", 200, "--ignore-eos", "--temp", 0, "-p", "Hi"]
        self.of["run shift"] = lambda: command(*line)
        self.of["run shift keep"] = lambda: command(*line, "--keep", 9)

    def serve(self) -> None:
        asked: dict[str, dict[str, Any]] = {
            "plain": {}, "stream": {"stream": True}, "n": {"n": 2}, "logprobs": {"logprobs": True, "top_logprobs": 2},
            "tools": {"tools": [TOOL]}, "must": {"tools": [TOOL], "tool_choice": "required", "stream": True},
            "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "stop": {"stop": ["it"]}, "hot": {"temperature": 1.4},
        }  # fmt: skip
        for (name, more), question in itertools.product(asked.items(), QUESTIONS[:2]):
            fields = {"seed": 5, "max_tokens": 40, **more}
            self.of[f"serve {name} {question[:12]}"] = lambda fields=fields, question=question: self.served(
                question, fields
            )

    def served(self, question: str, fields: dict[str, Any]) -> Any:
        """Ask twice at once: both replies without what is another every time."""
        from concurrent.futures import ThreadPoolExecutor

        from served import serving

        with serving({"guide": str(localllm.builtin_model())}) as server, ThreadPoolExecutor(2) as callers:
            replies = [*callers.map(lambda _: server.chat(question, **fields), range(2))]
        return [[reply.status, said(reply.body.decode())] for reply in replies]


def said(body: str) -> str:
    """Return a reply without ids, times and what the cache had."""
    body = re.sub(r'"(id|call_id|created|cached_tokens|timings|system_fingerprint)": ?("[^"]*"|[0-9.]+)', "", body)
    return re.sub(r'"(id|created|cached_tokens)":("[^"]*"|[0-9.]+)', "", body)


def write_mtp(path: Path, name: str) -> None:
    from models import write

    write(with_guess(name), path)


def answer_of(case: Case) -> Any:
    try:
        return case()
    except LocalllmError as error:
        return [type(error).__name__, str(error)]


def played(words: list[str]) -> dict[str, Any]:
    """Return the answers of the chosen cases."""
    main.ignore_ctrl_c = main.prepare_interpreter = lambda: None  # type: ignore[assignment]
    output.end_output = lambda: None  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        cases, found = Cases(Path(folder)), dict[str, Any]()
        for name, case in cases.of.items():
            if all(word in name for word in words):
                began, text = time.perf_counter(), json.dumps(answer_of(case), default=str)
                text = text.replace(folder, "").replace(str(ROOT), "")
                found[name] = {"hash": hashlib.sha256(text.encode()).hexdigest()[:16], "text": text}
                if (spent := time.perf_counter() - began) > 3:
                    print(f"{name}: {spent:.1f} s")
        cases.close()
    return found


def run() -> int:
    action, file, *words = sys.argv[1:]
    began, found = time.perf_counter(), played(words)
    print(f"{len(found)} cases in {time.perf_counter() - began:.0f} s")
    if action == "record":
        Path(file).write_text(json.dumps(found, indent=1))
        return 0
    known = json.loads(Path(file).read_text())
    others = [name for name, now in found.items() if name not in known or known[name]["hash"] != now["hash"]]
    for name in others:
        print(f"{name}\n  was {known.get(name, {}).get('text', 'not there')[:600]}\n  is  {found[name]['text'][:600]}")
    print(f"{len(others)} differ")
    return bool(others)


if __name__ == "__main__":
    sys.exit(run())
