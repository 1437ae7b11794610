#!/usr/bin/env python3
"""Record what llama.cpp's samplers make of random logits, for tests/goldens/test_samplers.py.

    PEER/bin/python scripts/record/record_llama_samplers.py MODEL.gguf > tests/goldens/llama_samplers.json

PEER is a virtual environment with llama-cpp-python (recorded: 0.3.36); of the model, only the vocabulary is read, for
DRY's breakers. A case has the options by our names, the tokens before, and per token: the seed of the logits, which
candidates llama.cpp left (null: all), with what probabilities, and which it drew, if it draws.
"""

import ctypes
import json
import sys

import llama_cpp as llama
import numpy as np

VOCAB = 200
SMALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}  # nothing but the step in question
SEED = 7


def logits(seed: int, minus_infinity: bool) -> np.ndarray:
    """Those of the tests: RandomState never changes."""
    random = np.random.RandomState(seed)
    row = (random.standard_normal(VOCAB) * 3).astype(np.float32)
    if minus_infinity:
        row[random.rand(VOCAB) < 0.3] = -np.inf
    return row


def samplers(vocab, options: dict) -> list:
    """llama.cpp's samplers for the options, in the order in which its command line has them."""

    def of(name: str, default):
        return options.get(name, default)

    made = {
        "penalties": lambda: llama.llama_sampler_init_penalties(
            VOCAB, of("repeat_last_n", 64), of("repeat_penalty", 1.0),
            of("frequency_penalty", 0.0), of("presence_penalty", 0.0),
        ),
        "dry": lambda: dry(vocab, options),
        "top_n_sigma": lambda: llama.llama_sampler_init_top_n_sigma(of("top_n_sigma", -1.0)),
        "top_k": lambda: llama.llama_sampler_init_top_k(of("top_k", 40)),
        "typical": lambda: llama.llama_sampler_init_typical(of("typical", 1.0), 0),
        "top_p": lambda: llama.llama_sampler_init_top_p(of("top_p", 0.95), 0),
        "min_p": lambda: llama.llama_sampler_init_min_p(of("min_p", 0.05), 0),
        "xtc": lambda: llama.llama_sampler_init_xtc(of("xtc_probability", 0.0), of("xtc_threshold", 0.1), 0, SEED),
        "temperature": lambda: llama.llama_sampler_init_temp_ext(
            of("temperature", 0.8), of("dynatemp_range", 0.0), of("dynatemp_exponent", 1.0)
        ),
        "adaptive_p": lambda: llama.llama_sampler_init_adaptive_p(
            of("adaptive_target", -1.0), of("adaptive_decay", 0.9), SEED
        ),
    }  # fmt: skip
    chain = []
    if "logit_bias" in options:
        biases = [llama.llama_logit_bias(int(token), bias) for token, bias in options["logit_bias"].items()]
        chain.append(
            llama.llama_sampler_init_logit_bias(VOCAB, len(biases), (llama.llama_logit_bias * len(biases))(*biases))
        )
    if options.get("mirostat"):
        tau, eta = of("mirostat_tau", 5.0), of("mirostat_eta", 0.1)
        chain.append(llama.llama_sampler_init_temp(of("temperature", 0.8)))
        if options["mirostat"] == 1:
            chain.append(llama.llama_sampler_init_mirostat(VOCAB, SEED, tau, eta, 100))
        else:
            chain.append(llama.llama_sampler_init_mirostat_v2(SEED, tau, eta))
        return chain
    names = options.get("samplers", "penalties;dry;top_n_sigma;top_k;typical;top_p;min_p;xtc;temperature").split(";")
    chain += [made[name]() for name in names]
    if "adaptive_target" in options:
        chain.append(made["adaptive_p"]())
    return chain


def dry(vocab, options: dict):
    texts = [text.encode() for text in options.get("dry_sequence_breakers", ["\n", ":", '"', "*"])]
    return llama.llama_sampler_init_dry(
        vocab, options.get("dry_multiplier", 0.0), options.get("dry_base", 1.75), options.get("dry_allowed_length", 2),
        options.get("dry_penalty_last_n", 64), (ctypes.c_char_p * len(texts))(*texts), len(texts),
    )  # fmt: skip


def run(vocab, options: dict, before: list[int], rows: int, minus_infinity: bool) -> dict:
    """Return a case: the options, and what came out, row by row."""
    chain, steps = samplers(vocab, options), []
    for token in before:
        for sampler in chain:
            llama.llama_sampler_accept(sampler, token)
    for seed in range(rows):
        row = logits(seed, minus_infinity)
        data = (llama.llama_token_data * VOCAB)(*(llama.llama_token_data(i, float(x), 0.0) for i, x in enumerate(row)))
        array = llama.llama_token_data_array(data, VOCAB, -1, False)
        for sampler in chain:
            llama.llama_sampler_apply(sampler, ctypes.byref(array))
        left = sorted((array.data[i].id, array.data[i].logit) for i in range(array.size))
        left = [(token, logit) for token, logit in left if logit > -np.inf]
        values = np.array([logit for _, logit in left])
        weights = np.exp(values - values.max())
        drawn = array.data[array.selected].id if array.selected >= 0 else None
        probabilities = [float(f"{p:.5g}") for p in weights / weights.sum()]
        ids = [token for token, _ in left] if len(left) < VOCAB else None
        steps.append({"ids": ids, "probabilities": probabilities, "drawn": drawn})
        for sampler in chain:
            if drawn is not None:
                llama.llama_sampler_accept(sampler, drawn)
    return {"options": options, "before": before, "minus_infinity": minus_infinity, "steps": steps}


def histories(vocab) -> list[list[int]]:
    """Texts that repeat themselves, of tokens below VOCAB of which some have a breaker."""
    newline = 198
    random = np.random.RandomState(5)
    plain, few = random.randint(60, 180, 30).tolist(), random.randint(60, 64, 90).tolist()
    quote = next(token for token in range(VOCAB) if b'"' in piece(vocab, token))
    return [
        [*plain, *plain[:9]],
        [*plain[:8], newline, *plain[8:20], *plain[:8], newline, *plain[8:12]],
        [*plain[:5], quote, *plain[5:10], 61, *plain[:5], quote, *plain[5:9]],
        few,
        [70] * 80,
        [70, 71],
    ]


def piece(vocab, token: int) -> bytes:
    buffer = ctypes.create_string_buffer(256)
    size = llama.llama_token_to_piece(vocab, token, buffer, 256, 0, True)
    return buffer.raw[:size]


def cases(vocab) -> list[dict]:
    recorded = []

    def add(options: dict, before: list[int] = (), rows: int = 2, infinity: tuple = (False, True)) -> None:
        recorded.extend(run(vocab, options, list(before), rows, minus) for minus in infinity)

    for name, values in {
        "top_k": [1, 7, 199], "top_p": [0.3, 0.9], "min_p": [0.02, 0.5],
        "top_n_sigma": [0.5, 1.0, 2.5], "temperature": [0.0, 0.3],
    }.items():  # fmt: skip
        for value in values:
            add({**SMALL, name: value})
    for p in (0.2, 0.7, 0.95):  # with a logit of -inf, its entropy is not a number
        add({**SMALL, "typical": p}, infinity=(False,))
    for threshold in (0.03, 0.1, 0.4, 0.51):
        add({**SMALL, "xtc_probability": 1.0, "xtc_threshold": threshold})
    for t, spread, exponent in ((0.8, 0.5, 1.0), (1.0, 1.0, 2.0), (0.3, 0.6, 0.5)):
        add({**SMALL, "temperature": t, "dynatemp_range": spread, "dynatemp_exponent": exponent}, infinity=(False,))
    add({**SMALL, "logit_bias": {"3": 4.5, "150": -2.0, "199": -np.inf}}, infinity=(False,))
    for before in histories(vocab):
        for amounts in (
            {"repeat_penalty": 1.3},
            {"presence_penalty": 0.7, "frequency_penalty": 0.2, "repeat_last_n": 20},
        ):
            add({**SMALL, **amounts}, before, 1, infinity=(False,))
        for more in (
            {},
            {"dry_allowed_length": 1, "dry_base": 1.2},
            {"dry_penalty_last_n": 25, "dry_allowed_length": 4},
            {"dry_base": 1.0, "dry_allowed_length": 0},
            {"dry_sequence_breakers": []},
        ):
            add({**SMALL, "dry_multiplier": 0.4, **more}, before, 1, infinity=(False,))
    for version in (1, 2):
        for tau, eta in ((5.0, 0.1), (2.0, 0.5), (0.5, 1.0)):
            add(
                {"temperature": 1.2, "mirostat": version, "mirostat_tau": tau, "mirostat_eta": eta},
                rows=6,
                infinity=(False,),
            )
    for target, decay in ((0.3, 0.9), (0.7, 0.5), (0.0, 0.99), (1.0, 0.0)):
        add({"adaptive_target": target, "adaptive_decay": decay, "top_k": 20}, rows=8, infinity=(False,))
    everything = {
        "repeat_penalty": 1.1, "dry_multiplier": 0.3, "top_n_sigma": 2.0, "top_k": 30, "typical": 0.95, "top_p": 0.95,
        "min_p": 0.01, "xtc_probability": 1.0, "xtc_threshold": 0.2, "temperature": 1.1, "dynatemp_range": 0.4,
    }  # fmt: skip
    for before in histories(vocab)[:2]:
        add({}, before)
        add(everything, before)
        add({**everything, "samplers": "temperature;xtc;min_p;top_p;typical;top_k;top_n_sigma;dry;penalties"}, before)
        add({**everything, "samplers": "top_k;temperature"}, before, 1)
        add({**everything, "temperature": 0.0, "dynatemp_range": 0.0}, before)
    return recorded


def main(path: str) -> None:
    llama.llama_backend_init()
    chosen = llama.llama_model_default_params()
    chosen.vocab_only = True
    vocab = llama.llama_model_get_vocab(llama.llama_model_load_from_file(path.encode(), chosen))
    recorded = cases(vocab)
    pieces = [piece(vocab, token).decode("latin-1") for token in range(VOCAB)]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in recorded)
    print(f'{{"vocab":{VOCAB},"pieces":{json.dumps(pieces)},"cases":[\n{lines}\n]}}')


if __name__ == "__main__":
    main(*sys.argv[1:])
