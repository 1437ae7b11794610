#!/usr/bin/env python
"""Train a head that guesses (EAGLE-3, arXiv 2503.01840) for a Llama model, and write it as a GGUF file.

    python scripts/train/train_guessing_head.py model.gguf head.gguf [--tokens 60000] [--minutes 8]
    localllm chat model.gguf --speculate draft:head.gguf

Needs PyTorch besides localllm. The head learns to go on with what the model itself says to questions of many kinds,
from what goes into two of its layers and comes out of the last one, as localllm computes them: so it meets in training
what it will meet. It also learns to go on from what it made itself, for drafts of several tokens, and guesses the
tokens that are frequent in these answers alone: for all of them the output matrix would be most of a guess's cost. One
question in ten is kept for the test, of which the share of right guesses is told at the end.
"""

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from localllm import api
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import OutputTensor, PackedValue, write_gguf
from localllm.generation.model_methods import gather_options
from localllm.generation.prefix_cache import NOTHING
from localllm.quant.encode import encode
from localllm.quant.formats import BY_NAME

TOPICS = """\
a lighthouse keeper, a refrigerator, the French Revolution, bread, a lost dog, the moon, photosynthesis, a small
town, volcanoes, a violin, bicycles, the ocean, a grandmother's garden, electricity, a winter morning, trains, a
library, the human heart, an old map, honey bees, a desert, glass, a chess game, rain, the Roman Empire, a
mountain village, paper, vaccines, a school play, earthquakes, coffee, a sailor, clouds, a museum, steel,
friendship, a forest fire, the number zero, a bridge, dinosaurs, a street market, sleep, a broken clock, whales,
democracy, a snowman, salt, a piano lesson, satellites, a river, mushrooms, an astronaut, money, a haunted
house, soap, penguins, a long walk, printing, a rainbow, a farmer""".replace("\n", " ").split(", ")
FORMS = (
    "Write a story about {}.", "Explain {} to a curious child.", "Describe {} in three paragraphs.",
    "Why does {} matter to people?", "Write a letter to a friend about {}.", "What should everybody know about {}?",
    "Tell me the history of {}.", "How does one write about {}?", "Give five facts about {}.",
    "What is good and what is bad about {}?", "Write a newspaper article about {}.", "Compare {} with something else.",
    "Write a dialog between two friends about {}.", "What could the future of {} look like?",
    "Give advice to somebody who wants to learn about {}.", "Write an essay about {} and the weather.",
)  # fmt: skip
ANSWER = 160  # tokens
FREQUENT = 4096  # tokens that may be guessed
ALIKE = (
    "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv", "context_length",
    "rope.freq_base", "attention.layer_norm_rms_epsilon", "vocab_size",
)  # fmt: skip


class Head(nn.Module):
    """The head; attributes are named as its tensors."""

    def __init__(self, told: dict[str, Any], output: Tensor):
        """told: the model's metadata, by ALIKE; output: first rows of its output matrix for the tokens to guess."""
        super().__init__()
        width, hidden, self.heads, kv_heads, _, self.base, epsilon, _ = (told[name] for name in ALIKE)
        self.dim = width // self.heads
        for name in ("attn_norm", "attn_norm_2", "ffn_norm", "output_norm"):
            setattr(self, name, nn.RMSNorm(width, epsilon))
        sizes = {
            "fc": (3 * width, width), "attn_q": (2 * width, width), "attn_k": (2 * width, kv_heads * self.dim),
            "attn_v": (2 * width, kv_heads * self.dim), "attn_output": (width, width), "ffn_gate": (width, hidden),
            "ffn_up": (width, hidden), "ffn_down": (hidden, width), "output": (width, len(output)),
        }  # fmt: skip
        for name, (columns, rows) in sizes.items():
            setattr(self, name, nn.Linear(columns, rows, bias=False))
        self.output.weight.data.copy_(output)

    def forward(self, embedded: Tensor, made: Tensor) -> Tensor:
        """[rows, tokens, width] twice to the same: what it makes of tokens, of what was made of the one before each."""
        both = torch.cat((self.attn_norm(embedded), self.attn_norm_2(made)), -1)
        q, k, v = (self._heads(project(both)) for project in (self.attn_q, self.attn_k, self.attn_v))
        q, k = rotated(q, self.base), rotated(k, self.base)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = made + self.attn_output(mixed.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(functional.silu(self.ffn_gate(h)) * self.ffn_up(h))

    def logits(self, made: Tensor) -> Tensor:
        """Of the tokens that may be guessed."""
        return self.output(self.output_norm(made))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)


def rotated(x: Tensor, base: float) -> Tensor:
    """Pairs of neighbours."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), base ** (-torch.arange(half) / half))
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def write_head(target: Path, model: GGUFFile, layers: list[int], tokens: np.ndarray, head: Head) -> None:
    """tokens: int64, those that may be guessed."""
    packed = {key: PackedValue(value.tobytes()) for key, value in model.packed.items()}
    metadata: dict[str, Any] = {key: value for key, value in packed.items() if key.startswith("tokenizer.ggml")}
    metadata |= {f"eagle3.{name}": packed[f"llama.{name}"] for name in ALIKE}
    metadata |= {"general.architecture": "eagle3", "eagle3.block_count": np.uint32(1)}
    metadata["eagle3.target_hidden_size"] = packed["llama.embedding_length"]
    metadata["eagle3.target_layers"] = np.array(layers, np.int32)
    tensors = [OutputTensor("d2t", BY_NAME["I64"], tokens.shape, (tokens,))]
    for name, values in head.state_dict().items():
        part, weights = name.removesuffix(".weight"), values.numpy()
        of_block = f"blk.0.{name}" if part not in ("fc", "output", "output_norm") else name
        if weights.ndim == 1:
            tensors.append(OutputTensor.from_array(of_block, weights))
        elif part == "fc":  # whose columns are of many sizes
            tensors.append(OutputTensor.from_array(of_block, weights.astype(np.float16)))
        else:
            tensors.append(OutputTensor(of_block, BY_NAME["Q8_0"], weights.shape, (encode("Q8_0", weights),)))
    write_gguf(target, metadata, tensors)


class Text(NamedTuple):
    """A text to learn from.

    Attributes:
        ids: of a question and its answer, int64 [tokens].  inputs: what went into the layers, float32 [tokens, 3
        width].
        begin: of the answer.
    """

    ids: np.ndarray
    inputs: np.ndarray
    begin: int


class Heard:
    """Stands in for a sequence's listener: what goes into the layers for tokens, by place."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.inputs = engine, dict[int, np.ndarray]()

    def heard(self, place: int, ids: np.ndarray, made: np.ndarray) -> None:
        self.inputs |= dict(enumerate(made.copy(), place))

    def follow_rewind(self, place: int) -> None:
        """Nothing is forgotten: a sequence goes back when it is closed only."""

    def close(self) -> None:
        """Nothing is open."""


def texts(path: str, untrained: Path, count: int, threads: int) -> list[Text]:
    """About `count` tokens of answers by the model."""
    questions = [form.format(topic) for form, topic in itertools.product(FORMS, TOPICS)]
    np.random.default_rng(0).shuffle(questions)
    found, started = [], time.time()
    with api.open_model(path, threads, 1024, cache=False) as model:
        model.resolve_drafter(f"draft:{untrained}")
        engine, begin, heard = model.engine, model.engine.sequence, dict[int, Heard]()

        def sequence() -> Any:
            made = begin()
            made.listener = Heard(engine._head)
            return made

        def keep(answering: Any, *_: object) -> None:
            if answering.sequence:
                heard[id(answering)] = answering.sequence.listener

        def asked() -> Iterator[Any]:
            for question in questions[: max(10, count // ANSWER)]:
                options = gather_options(ANSWER, (), {"temperature": 0.5, "seed": 1}, "off")
                request = model.session.request([{"role": "user", "content": question}], options)
                request.listener = keep
                yield request

        engine.sequence = sequence  # type: ignore[method-assign]
        batch = model.batch(asked(), 32, precise=False)
        batch._cache._find_match = lambda query: NOTHING  # type: ignore[method-assign]  # a fork would have heard nothing
        for request in itertools.chain.from_iterable(batch):
            (answering,) = request.answers
            inputs = heard.pop(id(answering)).inputs
            whole = list(itertools.takewhile(inputs.__contains__, range(len(answering.ids))))
            rows = np.stack([inputs[place] for place in whole])
            found.append(Text(np.array(answering.ids[: len(whole)]), rows, len(request.prompt)))
            print(f"\r{len(found)} texts in {time.time() - started:.0f} s", end="", flush=True)
    print()
    return found


class Batch(NamedTuple):
    """A batch of texts.

    Attributes:
        ids: int64 [rows, tokens]. numbers: among the tokens that may be guessed, -1 for others.
        inputs: float32 [rows, tokens, 3 width].  begin: of all the answers.
    """

    ids: Tensor
    numbers: Tensor
    inputs: Tensor
    begin: int


def batches(found: list[Text], tokens: np.ndarray, vocab: int, rows: int = 8) -> list[Batch]:
    """Texts of about the same length together, cut to the shortest."""
    ordered, made = sorted(found, key=lambda text: len(text.ids)), []
    number = np.full(vocab, -1)
    number[tokens] = np.arange(len(tokens))
    for first in range(0, len(ordered), rows):
        some = ordered[first : first + rows]
        length, begin = min(len(text.ids) for text in some), max(text.begin for text in some)
        if length > begin + 2:
            ids = np.stack([text.ids[:length] for text in some])
            inputs = torch.tensor(np.stack([text.inputs[:length] for text in some]))
            made.append(Batch(torch.tensor(ids), torch.tensor(number[ids]), inputs, begin))
    return made


def loss_and_right(head: Head, table: Tensor, batch: Batch, steps: int) -> tuple[Tensor, list[Tensor]]:
    """Return the loss, and which guesses of the answers are right, by step.

    The head reads token i with what is made of token i - 1, and says token i + 1; what it makes itself takes the
    model's place in the step behind.
    """
    total, right, before = torch.zeros(()), [], head.fc(batch.inputs)[:, :-1]
    for step in range(steps):
        made = head(table[batch.ids[:, step + 1 :]], before)
        logits, wanted = head.logits(made[:, :-1]), batch.numbers[:, step + 2 :]
        total = total + functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1) / (1 + step)
        right.append((logits.argmax(-1) == wanted)[:, max(0, batch.begin - step - 2) :])
        before = made[:, :-1]
    return total, right


def learn(head: Head, table: Tensor, data: list[Batch], minutes: float) -> None:
    """Adam with a rate that falls to nothing when the time is over."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    started, number, random = time.time(), 0, np.random.default_rng(1)
    while (share := (time.time() - started) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (number + 1) / 50) * (1 - share)
        loss, right = loss_and_right(head, table, data[random.integers(len(data))], 2)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        number += 1
        if number % 20 == 0:
            shares = ", ".join(f"{float(one.float().mean()):.3f}" for one in right)
            print(
                f"step {number}, {60 * minutes * share:.0f} s: loss {float(loss.detach()):.3f}, right {shares}",
                flush=True,
            )


def trained(head: Head, table: Tensor, found: list[Text], tokens: np.ndarray, minutes: float) -> None:
    """Train on nine texts in ten, and print the accuracy on the others' answers.

    Inputs are normalized by the size of each column, which is folded into the head's first matrix.
    """
    sizes = np.sqrt(np.mean([np.square(text.inputs).mean(0) for text in found], 0))
    scaled, test = [text._replace(inputs=text.inputs / sizes) for text in found], len(found) // 10
    learn(head, table, batches(scaled[test:], tokens, len(table)), minutes)
    with torch.no_grad():
        known = batches(scaled[:test], tokens, len(table))
        tested = [loss_and_right(head, table, batch, 3)[1] for batch in known]
        head.fc.weight /= torch.tensor(sizes)
    for step, parts in enumerate(zip(*tested, strict=True)):
        print(f"guess {step + 1}: {float(torch.cat([part.flatten() for part in parts]).float().mean()):.3f} right")


def dequantized(file: GGUFFile, name: str) -> Tensor:
    """Return a matrix of the model."""
    matrix = file.tensors[name]
    rows = np.asarray(matrix.data).view(np.uint8).reshape(matrix.shape[0], -1)
    return torch.tensor(gguf.dequantize(rows, gguf.GGMLQuantizationType[matrix.format.name]))


def main() -> None:
    """Parse, gather, train, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("target", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=60000)
    parser.add_argument("--minutes", type=float, default=8)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(chosen.threads)
    file = GGUFFile.open(chosen.model)
    told, depth = {name: file.metadata[f"llama.{name}"] for name in ALIKE}, int(file.metadata["llama.block_count"])
    layers, table = [2, depth // 2, depth], dequantized(file, "token_embd.weight")
    output = dequantized(file, "output.weight") if "output.weight" in file.tensors else table
    with tempfile.TemporaryDirectory() as folder:
        untrained, some = Path(folder, "untrained.gguf"), np.arange(32)
        write_head(untrained, file, layers, some, Head(told, output[some]))
        found = texts(chosen.model, untrained, chosen.tokens, chosen.threads)
    ids, counts = np.unique(np.concatenate([text.ids for text in found[len(found) // 10 :]]), return_counts=True)
    tokens = np.sort(ids[np.argsort(-counts, kind="stable")[:FREQUENT]]).astype(np.int64)
    print(f"{counts.sum()} tokens to learn from, {len(ids)} different ones", flush=True)
    head = Head(told, output[tokens])
    trained(head, table, found, tokens, chosen.minutes)
    write_head(chosen.target, file, layers, tokens, head)
    file.close()
    print(f"{chosen.target}: {os.path.getsize(chosen.target) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
