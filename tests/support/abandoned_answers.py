"""A program that abandons answers and lets Python collect garbage at the worst moments.

Run by tests/integration/test_abandoned_answers.py.

    python abandoned_answers.py SCENARIO MOMENT [ENCODER]

An abandoned answer is part of a cycle, so that only the garbage collector ends it. MOMENT is when it runs: "always",
at every allocation of any thread, or "locked", only while a thread holds one of the engine's locks, which then must
not be requested again. Prints one JSON line: the texts of the answers that were not abandoned.
"""

import asyncio
import gc
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import localllm
from localllm.engine import forks

QUESTION = [{"role": "user", "content": "What is localllm?"}]


class CollectingLock:
    """A lock whose holder collects garbage at some call of a function: each time at a later one, up to the 40th."""

    acquired = 0

    def __init__(self) -> None:
        self._lock = Lock()

    def __enter__(self) -> None:
        self.acquire()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            CollectingLock.acquired += 1
            self._calls_left = CollectingLock.acquired % 40
            sys.setprofile(self._count_call)
        return taken

    def _count_call(self, frame: Any, event: str, argument: Any) -> None:
        self._calls_left -= 1
        if self._calls_left < 0:
            sys.setprofile(None)
            gc.collect()

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        sys.setprofile(None)
        self._lock.release()


Lock = threading.Lock


def abandon(answer: Any) -> None:
    """Begin an answer and leave it to the garbage collector."""
    box: dict[str, Any] = {"answer": answer}
    box["itself"] = box
    next(box["answer"])


def chat(model: Any, round_: int = 0) -> str:
    abandon(model.chat(QUESTION, max_tokens=400))
    abandon(model.generate("localllm is", max_tokens=400, speculate="ngram"))
    return "".join(model.chat([{"role": "user", "content": f"Hi {round_ % 3}"}], max_tokens=3, temperature=0))


def many(model: Any, round_: int = 0) -> str:
    prompts: list[Any] = [f"Number {n}:" for n in range(6)]
    abandon(model.map(prompts, max_tokens=30, parallel=3))
    return "|".join(answer.text for answer in model.map(prompts[:2], max_tokens=3, temperature=0))


def candidates(model: Any, round_: int = 0) -> str:
    abandon(model.chat(QUESTION, max_tokens=50))
    return "|".join(answer.text for answer in model.candidates("Hi", n=2, beams=3, max_tokens=3))


def drafted(model: Any, round_: int = 0) -> str:
    abandon(model.chat(QUESTION, max_tokens=60, speculate=model))
    return "".join(model.chat(QUESTION, max_tokens=3, temperature=0, speculate=model))


def conversation(model: Any, round_: int = 0) -> str:
    session = model.session
    session.messages = []
    abandon(session.ask("What is localllm?"))
    session.park()
    session.leave()
    return "".join(model.chat(QUESTION, max_tokens=2, temperature=0))


def threads(model: Any) -> list[str]:
    """Answer in eight threads, of which every second one abandons its answer."""
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        for _ in range(2):
            if number % 2:
                abandon(model.chat(QUESTION, max_tokens=40))
            else:
                prompt = [{"role": "user", "content": f"Hi {number}"}]
                texts[number] = "".join(model.chat(prompt, max_tokens=3, temperature=0))
            model.engine.get_cache_usage()

    running = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    return [texts[number] for number in sorted(texts)]


def tasks(model: Any) -> list[str]:
    """Answer tasks by threads, as a web application does, and cancel every second one midway."""

    async def stream(number: int) -> str:
        answer = model.chat(QUESTION, max_tokens=4 if number % 2 else 300, temperature=0)
        pieces = []
        while (piece := await asyncio.to_thread(next, answer, None)) is not None:
            pieces.append(piece)
        return "".join(pieces)

    async def all_of_them() -> list[str]:
        started = [asyncio.create_task(stream(number)) for number in range(6)]
        await asyncio.sleep(0.05)
        for task in started[::2]:
            task.cancel()
        results = await asyncio.gather(*started, return_exceptions=True)
        return [result for result in results if isinstance(result, str)]

    return asyncio.run(all_of_them())


def embed(model: Any, encoder: str) -> list[str]:
    with localllm.open(encoder) as reader:
        vectors = []
        for _ in range(3):
            abandon(model.chat(QUESTION, max_tokens=40))
            vectors.append(reader.embed(["one", "two"]).tobytes().hex())
        return vectors


def served(model: Any) -> list[str]:
    """Run a server whose every second client disconnects, and answer from its model in this thread, too."""
    from served import serving

    body = {"messages": QUESTION, "temperature": 0, "stream": True}
    with serving({"guide": lambda: model}) as server:

        def leave() -> None:
            connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse().read(10)
            connection.close()

        texts = []
        for _ in range(6):
            leaving = threading.Thread(target=leave)
            leaving.start()
            abandon(model.chat(QUESTION, max_tokens=40))
            reply = server.chat("What is localllm?", max_tokens=3, temperature=0)
            texts.append(reply.json["choices"][0]["message"]["content"])
            leaving.join()
        return texts


def forgotten(path: str) -> list[str]:
    """Open models that nobody closes."""
    for _ in range(4):
        model = localllm.open(path, threads=2)
        box: dict[str, Any] = {"answer": model.chat(QUESTION, max_tokens=20), "model": model}
        box["itself"] = box
        next(box["answer"])
    return ["forgotten"]


def rounds(scenario: Callable[[Any, int], str], model: Any) -> list[str]:
    return [scenario(model, number) for number in range(12)]


def main(name: str, moment: str, *more: str) -> None:
    scenarios: dict[str, Callable[[Any], list[str]]] = {
        scenario.__name__: partial(rounds, scenario) for scenario in (chat, many, candidates, drafted, conversation)
    }
    scenarios |= {"threads": threads, "tasks": tasks, "served": served, "embed": lambda model: embed(model, *more)}
    scenarios["forgotten"] = lambda model: forgotten(localllm.builtin_model())
    if moment == "locked":
        forks.threading = SimpleNamespace(Lock=CollectingLock)
    model = localllm.open(localllm.builtin_model())
    chat(model)  # kernels and imports, before garbage is collected so often
    if moment == "locked":
        gc.disable()
    else:
        gc.set_threshold(1)
    texts = scenarios[name](model)
    gc.enable()
    gc.set_threshold(700)
    gc.collect()
    model.close()
    print(json.dumps(texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
