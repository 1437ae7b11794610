"""Train the built-in model from scratch and write it as localllm/data/guide.gguf.

    pip install torch numpy gguf tokenizers
    python scripts/train/train_guide.py [--threads 2] [--output FILE] [--checkpoint FILE] [--first-round 2]

A Llama-architecture model: RMSNorm, grouped-query attention, interleaved rotary positions, SwiGLU, tied embeddings,
and a byte-level BPE vocabulary of its own. All text comes from guide_text.py; nothing is downloaded. Every draw is
seeded; on one machine with the same PyTorch and threads two runs agree.

Needs PyTorch 2.13. The file in the repository came from these rounds, on two cores of an Intel Emerald Rapids that did
much else at the same time: 36 minutes for the first and 18 for the second. It is not what this script gives to the
byte: each round was a longer one that was stopped at a checkpoint, and `serve` came to localllm between them, so the
first round and the tokenizer still had the answer that there is no server. A training that was stopped goes on from its
checkpoint. Score a new file with score_guide.py before it replaces the old one.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import guide_text
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

OUTPUT = Path(__file__).resolve().parents[2] / "localllm" / "data" / "guide.gguf"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IGNORED = -100  # the target of tokens that are not learned


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; row lengths are multiples of 32, the block of Q8_0."""

    vocabulary: int = 2560
    width: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 768
    context: int = 1024
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head(self) -> int:
        """Dimension of one head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Training:
    """The length and the rates of a training."""

    row: int = 256  # tokens of a packed row
    rows: int = 8  # rows of a step
    rates: tuple[float, ...] = (3e-3, 1.5e-3)  # the highest of each round, from which it falls to zero,
    ends: tuple[int, ...] = (1600, 600)  # but a round ends after so many steps: the first near the second's rate
    warmup: int = 100
    decay: float = 0.05
    smoothing: float = 0.05
    decisive: int = 5  # first tokens of an answer, which decide what it is,
    decisive_weight: float = 3.0  # and what they count in the loss
    opening: int = 10  # tokens of an answer when only its opening is learned
    opening_shares: tuple[float, ...] = (0.85, 0.6)  # it decides which answer it is; reciting is soon learned


class Block(nn.Module):
    """One layer; the projections carry the names that they have in the file."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head
        self.attn_norm = nn.RMSNorm(shape.width, shape.epsilon)
        self.attn_q = nn.Linear(shape.width, shape.width, bias=False)
        self.attn_k = nn.Linear(shape.width, kv, bias=False)
        self.attn_v = nn.Linear(shape.width, kv, bias=False)
        self.attn_output = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width, shape.epsilon)
        self.ffn_gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.ffn_down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """[rows, tokens, width] to the same; mask [rows, 1, tokens, tokens] is true where attention is allowed."""
        x = x + self.attend(self.attn_norm(x), mask, rotation)
        h = self.ffn_norm(x)
        return x + self.ffn_down(functional.silu(self.ffn_gate(h)) * self.ffn_up(h))

    def attend(self, h: Tensor, mask: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Grouped-query attention."""
        rows, tokens, width = h.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(rows, tokens, -1, self.shape.head).transpose(1, 2)

        q, k, v = (
            rotate(heads(self.attn_q(h)), rotation),
            rotate(heads(self.attn_k(h)), rotation),
            heads(self.attn_v(h)),
        )
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        return self.attn_output(mixed.transpose(1, 2).reshape(rows, tokens, width))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on interleaved pairs, as the llama architecture of GGUF has them. x: [..., tokens, head]."""
    cosine, sine = rotation
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)


class Guide(nn.Module):
    """The model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.width, shape.epsilon)
        angles = shape.rope_base ** (-torch.arange(0, shape.head, 2) / shape.head)
        self.register_buffer("angles", torch.outer(torch.arange(shape.context), angles), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.04 / (2 * shape.layers) ** 0.5 if residual else 0.04)

    def forward(self, ids: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
        """Logits [wanted, vocabulary] of the positions where `wanted` [rows, tokens] is true."""
        angles = self.angles[: ids.shape[1]]
        rotation = angles.cos(), angles.sin()
        x = self.token_embd(ids)
        for block in self.blk:
            x = block(x, mask, rotation)
        return functional.linear(self.output_norm(x[wanted]), self.token_embd.weight)

    @torch.no_grad()
    def answer(self, tokenizer: Tokenizer, question: str, limit: int = 80) -> str:
        """Return a greedy answer, for looking at the model before it is exported."""
        ids = tokenizer.encode(chat_text("user", question) + "<|im_start|>assistant\n").ids
        start, end = len(ids), tokenizer.token_to_id("<|im_end|>")
        while len(ids) < start + limit:
            tokens = len(ids)
            wanted = torch.zeros(1, tokens, dtype=torch.bool)
            wanted[0, -1] = True
            mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
            choice = int(self(torch.tensor([ids]), mask, wanted).argmax())
            if choice == end:
                break
            ids.append(choice)
        return tokenizer.decode(ids[start:])


def chat_text(role: str, content: str) -> str:
    """Return a message as the chat template writes it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def make_tokenizer(model: models.BPE) -> Tokenizer:
    """Byte-level, with GPT-2's pre-tokenizer."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of an exported file."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = make_tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def train_tokenizer(vocabulary: int) -> Tokenizer:
    """From the first conversations of the training text."""
    tokenizer = make_tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = []
    for conversation in guide_text.conversations(seed=1, count=20_000):
        texts += ["system\n", "user\n", "assistant\n", conversation.system]
        texts += [text for turn in conversation.turns for text in turn]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def documents(tokenizer: Tokenizer, seed: int, count: int, training: Training) -> Iterator[tuple[list[int], list[int]]]:
    """Ids and targets of each conversation; only answers are targets, of the last one mostly just the opening."""
    rng = random.Random(seed)
    share = training.opening_shares[seed - 1]
    for conversation in guide_text.conversations(seed, count):
        system = [(chat_text("system", conversation.system), "")] if conversation.system else []
        asked = [
            (chat_text("user", question) + "<|im_start|>assistant\n", answer) for question, answer in conversation.turns
        ]
        ids: list[int] = []
        targets: list[int] = []
        for prompt, answer in system + asked:
            prompt_ids = tokenizer.encode(prompt).ids
            answer_ids = tokenizer.encode(f"{answer}<|im_end|>\n").ids if answer else []
            ids += prompt_ids + answer_ids
            targets += [IGNORED] * len(prompt_ids) + answer_ids[:-1] + [IGNORED] * min(1, len(answer_ids))
        surplus = len(answer_ids) - training.opening
        if surplus > 0 and rng.random() < share:
            ids, targets = ids[:-surplus], targets[:-surplus]
        yield ids[: 2 * training.row], [*targets[1 : 2 * training.row], IGNORED]


def batches(tokenizer: Tokenizer, seed: int, count: int, training: Training) -> Iterator[np.ndarray]:
    """Packed rows, int64 [rows, 3, row]: ids, targets and the number of the conversation within the row.

    Short rows are faster; conversations that are too long for them go into rows of twice the length, half as many.
    """
    short, long = Packer(training.row, training.rows), Packer(2 * training.row, training.rows // 2)
    for ids, targets in documents(tokenizer, seed, count, training):
        packer = short if len(ids) <= training.row else long
        if packer.add(ids, targets):
            yield packer.take()


class Packer:
    """Fills rows with conversations, one after the other."""

    def __init__(self, row: int, rows: int) -> None:
        self.row, self.rows = row, rows
        self.take()

    def take(self) -> np.ndarray:
        """Return the batch so far; an empty one takes its place."""
        full = getattr(self, "batch", None)
        self.batch = np.zeros((self.rows, 3, self.row), np.int64)
        self.batch[:, 1] = IGNORED
        self.at, self.used, self.number = 0, 0, 0
        return full

    def add(self, ids: list[int], targets: list[int]) -> bool:
        """Put a conversation in; whether the batch is full (a conversation that does not fit any more is left out)."""
        if self.used + len(ids) > self.row:
            self.at, self.used, self.number = self.at + 1, 0, 0
        if self.at == self.rows:
            return True
        span = slice(self.used, self.used + len(ids))
        self.number += 1
        self.batch[self.at, 0, span], self.batch[self.at, 1, span], self.batch[self.at, 2, span] = (
            ids,
            targets,
            self.number,
        )
        self.used += len(ids)
        return False


def learning_rate(step: int, steps: int, rate: float, training: Training) -> float:
    """Linear warm-up, then a linear decay to zero."""
    return rate * min((step + 1) / training.warmup, (steps - step) / max(1, steps - training.warmup))


def make_optimizers(model: Guide, training: Training) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding and the norms, with one learning rate."""
    matrices = [weight for weight in model.blk.parameters() if weight.dim() == 2]
    others = [weight for name, weight in model.named_parameters() if weight.dim() == 1 or name.startswith("token_embd")]
    return [
        torch.optim.Muon(matrices, weight_decay=training.decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def opening_weights(wanted: Tensor, training: Training) -> Tensor:
    """Weights [rows, tokens] of the loss: the first tokens of an answer, which decide what it is, count more."""
    run = torch.zeros_like(wanted[:, 0], dtype=torch.long)
    lengths = []
    for column in wanted.unbind(1):
        run = (run + 1) * column
        lengths.append(run)
    position = torch.stack(lengths, 1)
    return torch.where((position > 0) & (position <= training.decisive), training.decisive_weight, 1.0)


def batch_loss(model: Guide, batch: np.ndarray, training: Training) -> tuple[Tensor, float]:
    """Return the loss of a batch, and the share of the decisive tokens that the model would say."""
    ids, targets, numbers = torch.from_numpy(batch).unbind(1)
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & (
        numbers[:, :, None] == numbers[:, None, :]
    )
    wanted = targets != IGNORED
    weights = opening_weights(wanted, training)[wanted]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, mask[:, None], wanted)
    losses = functional.cross_entropy(
        logits.float(), targets[wanted], label_smoothing=training.smoothing, reduction="none"
    )
    right = (logits.argmax(-1) == targets[wanted])[weights > 1].float().mean()
    return (losses * weights).sum() / weights.sum(), float(right)


def train(model: Guide, data: list[np.ndarray], training: Training, checkpoint: Checkpoint) -> None:
    """One pass over `data`, from where the checkpoint is to the end of the round."""
    rate, end = training.rates[checkpoint.number - 1], training.ends[checkpoint.number - 1]
    optimizers = make_optimizers(model, training)
    started, first = time.time(), checkpoint.load(model, optimizers)
    model.train()
    for step, batch in enumerate(data[first:end], first):
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["lr"] = learning_rate(step, len(data), rate, training)
        loss, right = batch_loss(model, batch, training)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == len(data) - 1:
            print(
                f"step {step}/{len(data)} loss {loss.item():.3f} right {right:.3f} {time.time() - started:.0f} s",
                flush=True,
            )
        if step % 200 == 199:
            checkpoint.save(model, optimizers, step + 1)
    model.eval()


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training after some steps of a round, from which it goes on."""

    path: Path
    number: int

    def save(self, model: Guide, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
        """Replace the file."""
        states = [optimizer.state_dict() for optimizer in optimizers]
        part = self.path.with_suffix(".part")
        torch.save({"round": self.number, "steps": steps, "model": model.state_dict(), "optimizers": states}, part)
        part.replace(self.path)

    def load(self, model: Guide, optimizers: list[torch.optim.Optimizer]) -> int:
        """Take over its state if it is of this round; the number of steps that are done."""
        state = torch.load(self.path) if self.path.exists() else {"round": 0}
        if state["round"] != self.number:
            return 0
        model.load_state_dict(state["model"])
        for optimizer, own in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        return state["steps"]


def export(model: Guide, tokenizer: Tokenizer, path: Path) -> None:
    """Write the GGUF file: matrices Q8_0, norms F32."""
    shape = model.shape
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("model")
    writer.add_name("localllm guide")
    writer.add_description(
        "A tiny model that answers questions about localllm; trained by scripts/train/train_guide.py"
    )
    writer.add_license("mit")
    writer.add_size_label(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f}M")
    writer.add_languages(["en"])
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, tokenizer)
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Tokens, merges, special tokens and the chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def load_weights(model: Guide, path: Path) -> None:
    """Take over the weights of an exported file."""
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        model.get_parameter(tensor.name).data.copy_(values)


def main() -> None:
    """Train round by round; each starts with the file that the one before it wrote."""
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--first-round", type=int, default=1, help="2 continues with OUTPUT as it is")
    parser.add_argument("--checkpoint", type=Path, default=Path("guide.checkpoint"), help="where a stopped one goes on")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    shape, training = Shape(), Training()
    fresh = arguments.first_round == 1
    tokenizer = train_tokenizer(shape.vocabulary) if fresh else load_tokenizer(arguments.output)
    model = Guide(shape)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters")
    for number, (seed, count) in list(enumerate(guide_text.ROUNDS, 1))[arguments.first_round - 1 :]:
        if number > 1:
            load_weights(model, arguments.output)
        data = list(batches(tokenizer, seed, count, training))
        print(f"round {number}: {count} conversations, {sum(int((batch[:, 2] > 0).sum()) for batch in data)} tokens")
        train(model, data, training, Checkpoint(arguments.checkpoint, number))
        export(model, tokenizer, arguments.output)
    arguments.checkpoint.unlink(missing_ok=True)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
