"""Compare hidden states, patches, attention weights and log probabilities with transformers'.

    localllm quantize model.gguf model-f32.gguf F32 --allow-requantize --force
    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers gguf accelerate
    /tmp/torch/bin/python scripts/record/compare_hidden_states.py states.npz model-f32.gguf
    .venv/bin/python scripts/record/compare_hidden_states.py states.npz model-f32.gguf [other.gguf]

The first run, in an environment with torch, records transformers' values; the second prints how far ours are off: the
largest difference divided by the largest value of an array, and nats for log probabilities. With a third file, the log
probabilities are also compared with those of that file, such as the quantized one that model-f32.gguf was made from.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

TEXT = "The Eiffel Tower stands in Paris, the capital of France. It was built in 1889 for the World's Fair, and was"
PATCHED_LAYER, PATCHED_TOKEN, SOURCE_TOKEN, STEERED_LAYER = 7, 9, 14, 12
ATTENTION_LAYERS = 0, 5, 29


def make_vector(width: int) -> np.ndarray:
    """Return the vector that steers, float32 [width]."""
    return np.random.default_rng(0).standard_normal(width).astype(np.float32)


def record(path: str, model_path: str) -> None:
    """Record what transformers computes: an .npz file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(model_path)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([tokenizer.encode(TEXT)])
    vector = torch.from_numpy(make_vector(model.config.hidden_size))

    def patch(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states = arguments[0].clone()
        if states.shape[1] > PATCHED_TOKEN:  # not in decode
            states[0, PATCHED_TOKEN] = states[0, SOURCE_TOKEN]
        return (states, *arguments[1:])

    def steer(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0] + vector, *arguments[1:])

    values = dict[str, np.ndarray]()
    with torch.no_grad():
        last = list[Any]()
        hook = model.model.norm.register_forward_pre_hook(lambda module, arguments: last.append(arguments[0][0]))
        plain = model(ids, output_hidden_states=True, output_attentions=True)
        hook.remove()
        states = [*(state[0] for state in plain.hidden_states[:-1]), last[0]]  # the last one of theirs is normalized
        values["states"] = torch.stack(states).numpy()
        for layer in ATTENTION_LAYERS:
            values[f"attention{layer}"] = plain.attentions[layer][0].numpy()
        values["logits"] = plain.logits[0].numpy()
        for name, layer, function in (("patched", PATCHED_LAYER, patch), ("steered", STEERED_LAYER, steer)):
            hook = model.model.layers[layer].register_forward_pre_hook(function)
            values[name] = model(ids).logits[0].numpy()
            values[f"{name}_ids"] = model.generate(ids, max_new_tokens=24, do_sample=False)[0].numpy()
            hook.remove()
    np.savez(path, ids=ids[0].numpy(), **values)


def compare(path: str, model_path: str, other_path: str | None) -> None:
    """Print how far localllm's values are off."""
    import localllm

    theirs = np.load(path)
    ids = theirs["ids"].tolist()
    model = localllm.open(model_path, threads=2, context=512, kv_type="f32", cache=False)
    assert model.tokenize(TEXT) == ids, "the tokens differ"
    report("hidden states, worst layer", model.hidden_states(ids), theirs["states"])
    for layer in ATTENTION_LAYERS:
        report(f"attention of layer {layer}", model.attention(ids, layer)[None], theirs[f"attention{layer}"][None])
    vector = make_vector(model.engine.hyperparameters.width)

    def patch(states: np.ndarray, layer: int, position: int) -> None:
        if position <= PATCHED_TOKEN < position + len(states):
            states[PATCHED_TOKEN - position] = states[SOURCE_TOKEN - position]

    hooks: list[tuple[str, Any, int]] = [
        ("patched", patch, PATCHED_LAYER),
        ("steered", lambda states, layer, position: states + vector, STEERED_LAYER),
    ]
    report("logits", model.logits(ids)[None], theirs["logits"][None])
    for name, function, layer in hooks:
        hooked = model.hooked(function, layer)
        report(f"logits, {name}", hooked.logits(ids)[None], theirs[name][None])
        answer = [*ids, *(hooked.generate(ids, max_tokens=24, temperature=0, ignore_eos=True).tokens)]
        length = len(theirs[f"{name}_ids"])
        print(f"24 tokens, {name}: {'equal' if answer[:length] == theirs[f'{name}_ids'].tolist() else 'different'}")
    rows = theirs["logits"].astype(np.float64)
    logprobs = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1)[:, None]
    expected = logprobs[np.arange(len(ids) - 1), ids[1:]]
    for each in filter(None, (model_path, other_path)):
        with localllm.open(each, threads=2, context=512, cache=False) as opened:
            ours = np.array([token.logprob for token in opened.logprobs(TEXT)[1:]])
        print(f"log probabilities, {Path(each).name}: {np.abs(ours - expected).max():.2g} nats")


def report(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Print the largest relative difference of a list of arrays."""
    print(f"{name}: {max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True)):.2g}")


if __name__ == "__main__":
    path, model_path, *others = sys.argv[1:]
    if find_spec("torch"):
        record(path, model_path)
    else:
        compare(path, model_path, others[0] if others else None)
