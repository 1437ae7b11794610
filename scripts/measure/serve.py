"""Compare the server's throughput and latency with `map`.

    python scripts/measure serve MODEL

The same prompts of random tokens, answered greedily by Model.map and by callers of `localllm serve` in a process of its
own: tokens a second of each, the time between two tokens of a stream, the first token of somebody who comes while the
others write, and one caller beside one Generation.
"""

import argparse
import asyncio
import json
import subprocess
import time

import numpy as np
from common import ROOT, localllm_command, make_parser

from localllm import api

PORT = 11987
Stream = list[float]  # when each token came


async def ask(prompt: list[int], tokens: int, times: Stream) -> None:
    """One stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=1 << 20)
    body = json.dumps(
        {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 0}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()


async def at_once(prompts: list[list[int]], tokens: int, late: list[int] | None) -> tuple[float, list[Stream], float]:
    """Seconds for all, the times of each, and how long a late one waited for its first token."""
    streams: list[Stream] = [[] for _ in prompts]
    begin = time.perf_counter()
    tasks = [asyncio.create_task(ask(prompt, tokens, times)) for prompt, times in zip(prompts, streams, strict=True)]
    waited, others = 0.0, Stream()
    if late:
        while not all(len(times) > 2 for times in streams):
            await asyncio.sleep(0.01)
        asked = time.perf_counter()
        await ask(late, 4, others)
        waited = others[0] - asked
    await asyncio.gather(*tasks)
    return time.perf_counter() - begin, streams, waited


def alone_prompt(prompts: list[list[int]]) -> list[int]:
    """Return a prompt that has no common prefix with the others."""
    return [*prompts[2][1:], prompts[2][0]]


def by_map(path: str, prompts: list[list[int]], tokens: int, threads: int, context: int) -> tuple[float, float]:
    """Measure the seconds of Model.map for all prompts, and of one Generation for the first."""
    with api.open_model(path, threads, context, cache=False) as model:
        options = {"temperature": 0, "ignore_eos": True}
        list(model.map(prompts[:1], 2, **options))
        begin = time.perf_counter()
        assert all(len(answer.tokens) == tokens for answer in model.map(prompts, tokens, parallel=16, **options))
        all_at_once = time.perf_counter() - begin
        begin = time.perf_counter()
        "".join(model.generate(alone_prompt(prompts), tokens, **options))
        return all_at_once, time.perf_counter() - begin


def by_server(arguments: argparse.Namespace, prompts: list[list[int]], context: int) -> None:
    """Send the prompts by HTTP, and print the measurements."""
    options = ["--port", PORT, "-c", context, "-t", arguments.threads, "--no-cache"]
    command = localllm_command("serve", arguments.model, *options)
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            while "Ctrl-C stops the server" not in (line := process.stderr.readline()):
                assert line, "the server ended"
            asyncio.run(at_once(prompts[:1], 2, None))
            seconds, streams, _ = asyncio.run(at_once(prompts, arguments.tokens, None))
            rate = len(prompts) * arguments.tokens / seconds
            print(f"serve: {seconds:.2f} s, {rate:.1f} tokens/s", flush=True)
            tell_gaps(streams)
            fresh = [prompt[::-1] for prompt in prompts]
            _, streams, waited = asyncio.run(at_once(fresh[1:16], arguments.tokens, fresh[0]))
            print(f"first token of a late caller while {len(fresh[1:16])} write: {waited:.2f} s", flush=True)
            tell_gaps(streams)
            seconds, _, _ = asyncio.run(at_once([alone_prompt(prompts)], arguments.tokens, None))
            print(f"one caller: {seconds:.2f} s", flush=True)
        finally:
            process.terminate()


def tell_gaps(streams: list[Stream]) -> None:
    """Print how long readers wait between tokens."""
    gaps = np.concatenate([np.diff(times[:-1]) for times in streams])
    gaps = gaps[gaps > 0.001]  # what came with the same piece of the stream is one
    print(f"between tokens: median {np.median(gaps):.3f} s, p99 {np.quantile(gaps, 0.99):.3f} s", flush=True)


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser(__doc__, "model")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("-c", "--context", type=int, default=4096)
    arguments = parser.parse_args()
    context = arguments.context
    size = api.open_tokenizer(arguments.model).vocab_size
    prompts = np.random.default_rng(0).integers(3, size, (arguments.prompts, arguments.length)).tolist()
    by_server(arguments, prompts, context)
    many, one = by_map(arguments.model, prompts, arguments.tokens, arguments.threads, context)
    print(f"map: {many:.2f} s, {len(prompts) * arguments.tokens / many:.1f} tokens/s; one Generation: {one:.2f} s")
