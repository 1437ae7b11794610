#!/usr/bin/env python
"""Train a layer that guesses (multi-token prediction) for a Llama model, and write both as one GGUF file.

    python scripts/train_guessing_layer.py model.gguf with-guesses.gguf [--tokens 60000] [--minutes 8]

Needs PyTorch besides localllm. The model is not changed: its blocks of weights are copied, under the names of the
architecture glm4moe, which without experts is a Llama whose queries and keys rotate by halves (rows are put in that
order). The layer learns what the model itself says to questions of many kinds, read together with what the model made
of each token, as localllm computes both: so it meets in training what it will meet. It also learns to go on from what
it made itself, for drafts of several tokens. One question in ten is kept for the test, of which the share of right
guesses is told at the end.
"""

import argparse
import itertools
import math
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from localllm import api
from localllm.files.gguf_file import GGUFFile
from localllm.files.gguf_writer import Output, Packed, write_gguf
from localllm.generation.answering import AnswerRequest
from localllm.quant.formats import BY_NAME

RENAMED = {"ffn_norm": "post_attention_norm"}
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
)  # fmt: skip
ANSWER = 160  # tokens


class Layer(nn.Module):
    """The layer; attributes are named as its tensors."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int, base: float, epsilon: float):
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.base = heads, kv_heads, width // heads, base
        for name in ("enorm", "hnorm", "attn_norm", "post_attention_norm", "shared_head_norm"):
            setattr(self, name, nn.RMSNorm(width, epsilon))
        sizes = {
            "eh_proj": (2 * width, width), "attn_q": (width, width), "attn_k": (width, kv_heads * self.dim),
            "attn_v": (width, kv_heads * self.dim), "attn_output": (width, width), "ffn_gate": (width, hidden),
            "ffn_up": (width, hidden), "ffn_down": (hidden, width),
        }  # fmt: skip
        for name, (columns, rows) in sizes.items():
            setattr(self, name, nn.Linear(columns, rows, bias=False))

    def forward(self, embedded: Tensor, made: Tensor) -> Tensor:
        """[rows, tokens, width] twice to the same, behind the last norm."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(made)), -1))
        h = self.attn_norm(x)
        q, k, v = (self._heads(project(h)) for project in (self.attn_q, self.attn_k, self.attn_v))
        q, k = rotated(q, self.base), rotated(k, self.base)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attn_output(mixed.transpose(1, 2).flatten(2))
        h = self.post_attention_norm(x)
        x = x + self.ffn_down(functional.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return self.shared_head_norm(x)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)


def rotated(x: Tensor, base: float) -> Tensor:
    """By halves: number i of a head with number i + dim / 2."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), base ** (-torch.arange(half) / half))
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def file_with(path: str, target: Path, layer: Layer) -> None:
    """The model's blocks as glm4moe, and the layer."""
    file = GGUFFile.open(path)
    metadata: dict[str, Any] = {
        re.sub(r"^llama\.", "glm4moe.", key): Packed(value.tobytes()) for key, value in file.packed.items()
    }
    layers = int(file.metadata["llama.block_count"])
    metadata |= {"general.architecture": "glm4moe", "glm4moe.block_count": np.uint32(layers + 1)}
    metadata["glm4moe.nextn_predict_layers"] = np.uint32(1)
    tensors = []
    for name, tensor in file.tensors.items():
        part = name.split(".")[-2]
        data = np.asarray(tensor.data).view(np.uint8).reshape(math.prod(tensor.shape[:-1]), -1)
        if part in ("attn_q", "attn_k"):  # pairs of neighbours become halves
            data = data.reshape(-1, layer.dim // 2, 2, data.shape[1]).transpose(0, 2, 1, 3).reshape(data.shape)
        renamed = name.replace(part, RENAMED.get(part, part))
        tensors.append(Output(renamed, tensor.format, tensor.shape, (np.ascontiguousarray(data),)))
    for name, values in layer.state_dict().items():
        part = name.removesuffix(".weight")
        own = f"nextn.{part}" if part in ("eh_proj", "enorm", "hnorm", "shared_head_norm") else part
        array = values.numpy().astype(np.float32 if values.ndim == 1 else np.float16)
        kind = BY_NAME["F32" if values.ndim == 1 else "F16"]
        tensors.append(Output(f"blk.{layers}.{own}.weight", kind, array.shape, (np.ascontiguousarray(array),)))
    write_gguf(target, metadata, tensors)
    file.close()


class Heard:
    """Stands in for a sequence's listener: what the model makes of tokens, by place."""

    def __init__(self) -> None:
        self.made = dict[int, np.ndarray]()

    def heard(self, place: int, ids: np.ndarray, made: np.ndarray) -> None:
        self.made |= dict(enumerate(made.astype(np.float16), place))

    def forget_behind(self, place: int) -> None:
        """Nothing is forgotten: a sequence goes back when it is closed only."""

    def close(self) -> None:
        """Nothing is open."""


def texts(path: Path, count: int, threads: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """About `count` tokens of answers by the model: ids [tokens], and what it made of them, float16 [tokens, width]."""
    questions = [form.format(topic) for form, topic in itertools.product(FORMS, TOPICS)]
    np.random.default_rng(0).shuffle(questions)
    found, started = [], time.time()
    with api.open_model(path, threads, 1024, cache=False) as model:
        begin, kept = model.engine.sequence, dict[int, Heard]()

        def sequence() -> Any:
            made = begin()
            made.listener = Heard()
            return made

        model.engine.sequence = sequence  # type: ignore[method-assign]
        asked = (
            model.session.request(
                [{"role": "user", "content": question}], api.options(ANSWER, (), {"temperature": 0.5, "seed": 1})
            )
            for question in questions[: max(10, count // ANSWER)]
        )

        def keep(answering: Any, *_: object) -> None:
            if answering.sequence:
                kept[id(answering)] = answering.sequence.listener

        def listened() -> Any:
            for request in asked:
                request.listener = keep
                yield request

        batch = model.batch(listened(), 32, precise=False)
        batch._donor = lambda answering: (None, 0)  # type: ignore[method-assign]  # a fork would have heard nothing
        for finished in batch:
            request: AnswerRequest
            for request in finished:
                (answering,) = request.answers
                made = kept.pop(id(answering)).made
                whole = [place for place in range(len(answering.ids)) if place in made]
                rows = np.stack([made[place] for place in whole])
                found.append((np.array(answering.ids[: len(whole)]), rows))
                print(f"\r{len(found)} texts in {time.time() - started:.0f} s", end="", flush=True)
    print()
    return found


def loss_and_right(
    layer: Layer, embedding: Tensor, ids: Tensor, made: Tensor, steps: int
) -> tuple[Tensor, list[Tensor]]:
    """Of texts [rows, tokens] that the model made this of: the loss, and which guesses are right, by step.

    The layer reads token i with what was made of token i - 1, and says token i + 1; what it makes itself takes the
    model's place in the step behind.
    """
    total, right, before = torch.zeros(()), [], made[:, :-1]
    for step in range(steps):
        said = layer(embedding[ids[:, step + 1 :]], before)
        logits, wanted = said[:, :-1] @ embedding.T, ids[:, step + 2 :]
        total = total + functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()) / (1 + step)
        right.append(logits.argmax(-1) == wanted)
        before = said[:, :-1]
    return total, right


def learn(layer: Layer, embedding: Tensor, data: list[tuple[Tensor, Tensor]], minutes: float) -> None:
    """Adam with a rate that falls to nothing when the time is over."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    started, number, random = time.time(), 0, np.random.default_rng(1)
    while (share := (time.time() - started) / (60 * minutes)) < 1:
        ids, made = data[random.integers(len(data))]
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (number + 1) / 50) * (1 - share)
        loss, right = loss_and_right(layer, embedding, ids, made, 2)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        number += 1
        if number % 20 == 0:
            shares = ", ".join(f"{float(one.float().mean()):.3f}" for one in right)
            print(f"step {number}, {60 * minutes * share:.0f} s: loss {float(loss):.3f}, right {shares}", flush=True)


def batches(found: list[tuple[np.ndarray, np.ndarray]], rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Texts of about the same length together, cut to the shortest."""
    ordered = sorted(found, key=lambda text: len(text[0]))
    together = [ordered[first : first + rows] for first in range(0, len(ordered), rows)]
    cut = [(some, min(len(ids) for ids, _ in some)) for some in together]
    return [
        (torch.tensor(np.stack([ids[:n] for ids, _ in some])), torch.tensor(np.stack([m[:n] for _, m in some])).float())
        for some, n in cut
        if n > 8
    ]


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
    told = {name: file.metadata[f"llama.{name}"] for name in (
        "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
        "rope.freq_base", "attention.layer_norm_rms_epsilon",
    )}  # fmt: skip
    layer = Layer(
        *(int(value) for value in list(told.values())[:4]), *(float(value) for value in list(told.values())[4:])
    )
    table = file.tensors["token_embd.weight"]
    numbers = gguf.dequantize(
        np.asarray(table.data).view(np.uint8).reshape(table.shape[0], -1), gguf.GGMLQuantizationType[table.format.name]
    )
    with tempfile.TemporaryDirectory() as folder:
        file_with(chosen.model, Path(folder, "untrained.gguf"), layer)
        found = texts(Path(folder, "untrained.gguf"), chosen.tokens, chosen.threads)
    used = np.unique(np.concatenate([ids for ids, _ in found]))  # other tokens are not learned: they cost too much time
    print(f"{sum(len(ids) for ids, _ in found)} tokens, {len(used)} different ones", flush=True)
    embedding = torch.tensor(numbers[used])
    found = [(np.searchsorted(used, ids), made) for ids, made in found]
    learn(layer, embedding, batches(found[len(found) // 10 :]), chosen.minutes)
    with torch.no_grad():
        tested = [loss_and_right(layer, embedding, ids, made, 3)[1] for ids, made in batches(found[: len(found) // 10])]
    for step, parts in enumerate(zip(*tested, strict=True)):
        print(f"guess {step + 1}: {float(torch.cat([part.flatten() for part in parts]).float().mean()):.3f} right")
    file_with(chosen.model, chosen.target, layer)
    file.close()
    print(f"{chosen.target}: {os.path.getsize(chosen.target) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
