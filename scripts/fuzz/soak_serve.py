#!/usr/bin/env python3
"""Stress `localllm serve` with clients that connect, disconnect, send garbage and repeat.

    python scripts/fuzz/soak_serve.py MODEL --seconds 3600

Prints how many requests there were, whether each answer equals that of the same seed without other clients, and the
server's memory halfway, when caches are full, and at the end. Exits with 1 if an answer was wrong or something still
runs.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path

PORT = 11988
WORDS = "What is a file format for language models and how do I stop an answer that is too long and what comes then"


def request_of(seed: int, stream: bool) -> bytes:
    """Return the request of a seed."""
    random_words = random.Random(seed)
    text = " ".join(random_words.choice(WORDS.split()) for _ in range(random_words.randint(3, 80)))
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": seed, "stream": stream}
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def talk(data: bytes, read: int | None = None) -> bytes:
    """Send a request and return the response; read: disconnect after this many bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(data)
    try:
        return await (reader.read() if read is None else reader.read(read))
    finally:
        writer.close()


async def caller(number: int, end: float, known: dict[int, str], counts: dict[str, int]) -> None:
    """One that does not behave."""
    choose = random.Random(number)
    while time.monotonic() < end:
        seed, kind = choose.randrange(40), choose.random()
        counts["requests"] += 1
        try:
            if kind < 0.5:
                reply = (await talk(request_of(seed, False))).partition(b"\r\n\r\n")[2]
                text = json.loads(reply)["choices"][0]["message"]["content"]
                counts["answers"] += 1
                counts["wrong"] += known.setdefault(seed, text) != text
            elif kind < 0.8:
                await talk(request_of(seed, choose.random() < 0.5), choose.choice([1, 100, 500]))
            elif kind < 0.9:
                await talk(request_of(seed, True)[: choose.randrange(1, 200)], 0)
            else:
                await talk(choose.randbytes(300) + b"\r\n\r\n")
        except OSError:
            counts["refused"] += 1


async def soak(seconds: float, callers: int, memory: Path) -> dict[str, int]:
    known, counts = dict[int, str](), dict.fromkeys(("requests", "answers", "wrong", "refused", "first", "last"), 0)
    for seed in range(40):
        reply = (await talk(request_of(seed, False))).partition(b"\r\n\r\n")[2]
        known[seed] = json.loads(reply)["choices"][0]["message"]["content"]
    for name, part in (("first", 0.5), ("last", 0.5)):
        end = time.monotonic() + seconds * part
        await asyncio.gather(*(caller(number, end, known, counts) for number in range(callers)))
        await asyncio.sleep(1)
        counts[name] = next(int(line.split()[1]) for line in memory.read_text().split("\n") if line.startswith("VmRSS"))
    health = json.loads(
        (await talk(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).split(b"\r\n\r\n")[1]
    )
    return {**counts, "running": health["running"], "waiting": health["waiting"]}


def main() -> None:
    """Run the clients and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--callers", type=int, default=16)
    options = parser.parse_args()
    command = [sys.executable, "-m", "localllm", "serve", options.model, "--port", str(PORT), "--no-cache"]
    with subprocess.Popen(
        command, cwd=Path(__file__).resolve().parents[2], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr
            while "Ctrl-C stops the server" not in (line := process.stderr.readline()):
                assert line, "the server ended"
            told = asyncio.run(soak(options.seconds, options.callers, Path(f"/proc/{process.pid}/status")))
        finally:
            process.terminate()
    print(json.dumps(told))
    sys.exit(bool(told["wrong"] or told["running"] or told["waiting"]))


if __name__ == "__main__":
    main()
