"""Stress a FastAPI application whose clients disconnect: no text may be wrong, and SIGTERM must end it in time.

    python scripts/platform/check_fastapi.py [MODEL] [--minutes 10] [--clients 32]

Half of the clients read their answers to the end and compare them with the answer to the same question without other
clients; the others read a little of a long answer and close the connection. Half of each are answered by `chat` in
threads, half by `achat` in the event loop. At the end SIGTERM comes during long answers.
"""

import argparse
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlencode

import localllm

GRACE = 5  # seconds that uvicorn gives responses after SIGTERM
TOKENS = 24
APPLICATION = f"""
import sys
import localllm, uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
model = localllm.open(sys.argv[1], context=1024, cache=False)
application = FastAPI()
def asked(question):
    return [{{"role": "user", "content": question}}]
@application.get("/threads")
def in_threads(question: str, tokens: int):
    return StreamingResponse(model.chat(asked(question), max_tokens=tokens, temperature=0))
@application.get("/tasks")
async def in_tasks(question: str, tokens: int):
    return StreamingResponse(model.achat(asked(question), max_tokens=tokens, temperature=0))
uvicorn.run(application, port=int(sys.argv[2]), log_level="error", timeout_graceful_shutdown={GRACE})
"""
QUESTIONS = [
    f"What is the capital of {country}? Answer with one word." for country in ("France", "Italy", "Japan", "Spain")
]
LONG = "Tell a long story about a river."


class Visitors:
    """Clients of the application, each in a thread.

    Attributes:
        seen: how many answers were whole, and how many were left.  wrong: texts that are not the expected ones.
        problems: errors before the end.
    """

    def __init__(self, port: int, expected: dict[str, str], count: int):
        self._port, self._expected, self._ending = port, expected, threading.Event()
        self.seen, self.wrong, self.problems = Counter[str](), list[tuple[str, str]](), list[BaseException]()
        self._threads = [threading.Thread(target=self._visit, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _visit(self, number: int) -> None:
        chance, path = random.Random(number), ("/threads", "/tasks")[number // 2 % 2]
        while not self._ending.is_set():
            try:
                if number % 2:
                    self._leave(path, chance)
                else:
                    self._stay(path, chance.choice(QUESTIONS))
            except BaseException as error:
                if not self._ending.is_set():
                    self.problems.append(error)
                return

    def _ask(self, path: str, question: str, tokens: int) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=120)
        connection.request("GET", f"{path}?{urlencode({'question': question, 'tokens': tokens})}")
        return connection

    def _leave(self, path: str, chance: random.Random) -> None:
        connection = self._ask(path, LONG, 400)
        try:
            if connection.getresponse().read(chance.randrange(1, 60)):
                self.seen["left"] += 1
        finally:
            connection.close()

    def _stay(self, path: str, question: str) -> None:
        connection = self._ask(path, question, TOKENS)
        try:
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        if not self._ending.is_set():
            self.seen["whole"] += 1
            if text != self._expected[question]:
                self.wrong.append((question, text))

    def end(self) -> None:
        """Begin answers that no client leaves, and expect the application to end."""
        self._ending.set()
        for path in ("/threads", "/tasks"):
            answering = threading.Event()
            self._threads.append(threading.Thread(target=self._wait, args=(path, answering)))
            self._threads[-1].start()
            answering.wait(60)

    def _wait(self, path: str, answering: threading.Event) -> None:
        """Read a long answer as far as it comes."""
        with suppress(OSError, HTTPException):
            connection = self._ask(path, LONG, 900)
            response = connection.getresponse()
            answering.set()
            response.read()

    def join(self) -> None:
        """Wait for all to have gone."""
        for thread in self._threads:
            thread.join(150)


def wait_until_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    """Raise RuntimeError if nothing listens within a minute."""
    for _ in range(600):
        if server.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the application does not listen")


def resident_mib(server: subprocess.Popen[bytes]) -> int:
    """Return the application's memory in MiB; 0 if the system does not report it."""
    status = Path(f"/proc/{server.pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


def check(path: str, seconds: float, clients: int) -> list[str]:
    """Let clients come and go for some minutes, then end the application; return the problems, a line each."""
    with localllm.open(path, context=1024, cache=False) as model:
        alone = {q: "".join(model.chat([{"role": "user", "content": q}], TOKENS, temperature=0)) for q in QUESTIONS}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", APPLICATION, path, str(port)])
    try:
        wait_until_listening(port, server)
        visitors = Visitors(port, alone, clients)
        time.sleep(seconds / 4)
        before = resident_mib(server)
        time.sleep(seconds * 3 / 4)
        after = resident_mib(server)
        visitors.end()
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(GRACE + 30)
        except subprocess.TimeoutExpired:
            return [f"SIGTERM has not ended the application within {GRACE + 30} s"]
        took = time.monotonic() - began
        visitors.join()
    finally:
        server.kill()
        server.wait()
    seen, wrong = visitors.seen, Counter(visitors.wrong)
    print(
        f"{seen['whole']} answers read, {seen['left']} left, {before} then {after} MiB, ended in {took:.1f} s",
        flush=True,
    )
    return [
        *(f"wrong, {times} times: {question!r} gave {text!r}" for (question, text), times in wrong.items()),
        *(f"{type(error).__name__}: {error}" for error in visitors.problems),
        *([] if seen["whole"] and seen["left"] else ["nobody was answered, or nobody left"]),
        *([] if took <= GRACE + 2 else [f"it took {took:.1f} s to end, of {GRACE} s of grace"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(localllm.builtin_model()))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    given = parser.parse_args()
    try:
        import fastapi  # noqa: F401
    except ImportError:
        print("skipped: FastAPI is not installed (pip install fastapi)")
        return 0
    problems = check(given.model, given.minutes * 60, given.clients)
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
