"""Measure what `run --on-overflow relevant` (or chunks) finds in long texts: three faults in a log, facts in a book.

    python scripts/measure long-texts MODEL log --lines 10000
    python scripts/measure long-texts MODEL book --pages 300 --facts 20
    python scripts/measure long-texts MODEL log --how chunks
    python scripts/measure long-texts MODEL book --how ask [--embedder MODEL] [--prose FILE]

Prints the answer, and which of the planted lines or facts it has. With chunks, it goes on after an interruption. "ask"
asks a question for each fact of the book, by `localllm ask`, which gives the model eight passages of it. --prose: the
text of the book, instead of sample texts that repeat themselves.
"""

import random
import tempfile
from itertools import cycle, islice
from pathlib import Path

from common import ROOT, localllm_command, make_parser, run_process

PAGE = 40  # lines
FAULTS = {
    "db1 postgres: FATAL: no space left on device, cannot write WAL": "no space left",
    "web2 nginx: upstream timed out after 60 s while reading /checkout": "timed out",
    "web3 kernel: Out of memory: killed process 4711 (java)": "4711",
}
LOG_QUESTION = "Which lines of this log report a fault (an error, a failure)? Quote each of these lines."
BORN = {
    "Ada": "Oslo", "Ben": "Lima", "Cleo": "Cairo", "Dan": "Quito", "Eva": "Delhi", "Finn": "Turin", "Gus": "Basel",
    "Hana": "Kyoto", "Ivo": "Perth", "Jade": "Minsk", "Kai": "Tunis", "Lena": "Havana", "Mats": "Riga",
    "Nora": "Bogota", "Olaf": "Dakar", "Pia": "Seoul", "Quin": "Porto", "Rosa": "Vienna",
    "Sven": "Izmir", "Tess": "Nairobi",
}  # fmt: skip
BOOK_QUESTION = "Which person was born in which city? List every person of whom the text says so, with the city."


def log(lines: int) -> tuple[str, list[str]]:
    """Return a log without faults but three, and what an answer must have of each."""
    draw = random.Random(7)
    hosts, pages, users = ["web1", "web2", "web3", "db1", "mail"], ["cart", "home", "login"], ["ann", "bob", "eve"]
    shapes = [
        lambda: f"{draw.choice(hosts)} nginx: GET /{draw.choice(pages)} 200",
        lambda: f"{draw.choice(hosts)} nginx: GET /img/{draw.randint(1, 99)}.png 304",
        lambda: f"{draw.choice(hosts)} sshd: session opened for {draw.choice(users)}",
        lambda: f"{draw.choice(hosts)} cron: job {draw.choice(['backup', 'rotate'])} finished",
        lambda: "db1 postgres: checkpoint complete",
        lambda: f"mail postfix: message {draw.randint(100, 999)} delivered",
    ]
    made = [draw.choice(shapes)() for _ in range(lines)]
    for line, share in zip(FAULTS, (0.22, 0.59, 0.85), strict=True):
        made[int(lines * share)] = line
    return "\n".join(made) + "\n", [*FAULTS.values()]


def book(pages: int, facts: int, path: Path) -> tuple[str, list[str]]:
    """Return prose with facts in it, evenly spread, and what an answer must have of each; path: of the prose."""
    prose = path.read_text(encoding="utf-8").splitlines()
    made = [*islice(cycle(prose), pages * PAGE)]
    planted = [*BORN.items()][:facts]
    for number, (name, city) in enumerate(planted):
        made[(2 * number + 1) * len(made) // (2 * facts)] = f"{name} was born in {city}."
    return "\n".join(made) + "\n", [f"{name}|{city}" for name, city in planted]


def has(answer: str, wanted: str) -> bool:
    """Return whether some line of an answer has all parts of what is wanted."""
    return any(all(part in line for part in wanted.split("|")) for line in answer.splitlines())


def ask_each(model: str, path: Path, wanted: list[str], embedder: str | None) -> str:
    """Ask where each person was born; returns the answers, a line each."""
    answers = []
    for name, _, _ in (each.partition("|") for each in wanted):
        command = localllm_command("ask", path, f"Where was {name} born?", "-m", model, "--temp", 0)
        _, _, answer = run_process([*command, *(["--embedder", embedder] if embedder else [])])
        answers.append(f"{name}: {' '.join(answer.split())}")
    return "\n".join(answers)


def main() -> None:
    parser = make_parser(__doc__, "model", threads=False)
    parser.add_argument("text", choices=["log", "book"])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=300)
    parser.add_argument("--facts", type=int, default=20, choices=range(1, 21), metavar="N")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--how", choices=["relevant", "chunks", "ask"], default="relevant")
    parser.add_argument("--embedder")
    parser.add_argument("--prose", type=Path, default=ROOT / "localllm" / "data" / "calibration" / "prose.txt")
    asked = parser.parse_args()
    text, wanted = log(asked.lines) if asked.text == "log" else book(asked.pages, asked.to_dict, asked.prose)
    question = LOG_QUESTION if asked.text == "log" else BOOK_QUESTION
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{asked.text}.txt"
        path.write_text(text, encoding="utf-8")
        if asked.method == "ask":
            answer = ask_each(asked.model, path, wanted, asked.embedder)
        else:
            command = localllm_command("run", asked.model, "-f", path, "--no-stdin", "-c", asked.context, "-n", 400)
            _, _, answer = run_process([*command, "--on-overflow", asked.method, "--temp", "0", "-p", question])
    found = [each for each in wanted if has(answer, each)]
    missing = [each for each in wanted if each not in found]
    print(answer)
    print(f"found: {len(found)} of {len(wanted)}" + (f"; not {', '.join(missing)}" if missing else ""))
