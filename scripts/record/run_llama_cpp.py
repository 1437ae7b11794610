#!/usr/bin/env python3
"""Run small models in llama.cpp, for scripts/record/record_goldens.py and record_tokens.py.

Needs a Python that has llama-cpp-python.

Reads a job per line of stdin, as JSON. {"model": path, "tokens": [...], "then": [...] or a count, "out": path} writes
an .npz with `prefill` [tokens, vocab], the tokens that were read behind them (the most likely, if `then` is a count)
and `decode` [those, vocab]. One thread, keys and values in float32, no flash attention (unless "flash"), the prompt in
one batch, no repacked weights; "encode": [...] are what an encoder reads before. {"model": path, "read": [[...], ...],
"alone": bool, "out": path} writes `rows` [texts, width], what a model that pools makes of each text, all in one batch,
or in a batch each. {"vocabulary": path, "texts": [...], "out": path} writes a .json with three lists of tokens for each
text: as it is, with special tokens read in it, and with those added to it, too. {"model": path, "score": [[...], ...],
"targets": [[...], ...], "out": path} writes a .json with how improbable (-ln p) each token of the second halves of the
targets is, as llama-perplexity counts, with two threads.
"""

import ctypes
import json
import sys

import llama_cpp as llama
import numpy as np

CONTEXT, LONG = 128, 256  # the second for more tokens than the first has room for
TEXTS = 8  # of a batch at most; it has to divide CONTEXT


def opened(path: str, texts: int = 1, room: int = CONTEXT, **more):
    """Return a model and a context for it, and for so many texts of so many tokens at once; more: of its parameters."""
    of_model = llama.llama_model_default_params()
    of_model.use_extra_bufts, of_model.n_gpu_layers = False, 0
    model = llama.llama_model_load_from_file(path.encode(), of_model)
    if not model:
        sys.exit(f"llama.cpp does not open {path}")
    chosen = llama.llama_context_default_params()
    chosen.n_batch = chosen.n_ubatch = room
    chosen.n_ctx, chosen.n_seq_max = room * texts, texts
    chosen.n_threads = chosen.n_threads_batch = 1
    chosen.type_k = chosen.type_v = 0  # GGML_TYPE_F32
    chosen.flash_attn_type, chosen.offload_kqv, chosen.swa_full = 0, False, True
    for name, value in more.items():
        setattr(chosen, name, value)
    return model, llama.llama_init_from_model(model, chosen)


def read(context, vocab: int, tokens: list[int], position: int, decode=llama.llama_decode) -> np.ndarray:
    """Read tokens; return the logits after each, float32 [tokens, vocab]; none with llama_encode."""
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position + i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    if decode(context, batch):
        sys.exit("llama.cpp does not compute it")
    if decode is llama.llama_encode:
        llama.llama_batch_free(batch)
        return np.zeros(0)
    rows = [np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (vocab,)) for i in range(len(tokens))]
    rows = np.stack(rows).copy()
    llama.llama_batch_free(batch)
    return rows


def run(job: dict) -> None:
    then = job["then"] if isinstance(job["then"], list) else [None] * job["then"]
    room = CONTEXT if len(job["tokens"]) + len(then) <= CONTEXT else LONG
    threads = job.get("threads", 1)
    model, context = opened(
        job["model"],
        room=room,
        flash_attn_type=int(job.get("flash", False)),
        n_threads=threads,
        n_threads_batch=threads,
    )
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    if job.get("encode"):
        read(context, vocab, job["encode"], 0, llama.llama_encode)
    prefill = read(context, vocab, job["tokens"], 0)
    last, tokens, decode = prefill[-1], [], []
    for token in then:
        tokens.append(int(last.argmax()) if token is None else token)
        last = read(context, vocab, tokens[-1:], len(job["tokens"]) + len(decode))[0]
        decode.append(last)
    llama.llama_free(context)
    llama.llama_model_free(model)
    np.savez(job["out"], prefill=prefill, then=np.array(tokens, np.int32), decode=np.array(decode))


def pool(job: dict) -> None:
    model, context = opened(job["model"], 1 if job["alone"] else TEXTS, embeddings=True)
    groups = [[text] for text in job["read"]] if job["alone"] else [job["read"]]
    rows = [row for texts in groups for row in pooled(model, context, texts)]
    llama.llama_free(context)
    llama.llama_model_free(model)
    np.savez(job["out"], rows=np.stack(rows))


def pooled(model, context, texts: list[list[int]]) -> list[np.ndarray]:
    """Return a row of each text, of one batch."""
    if memory := llama.llama_get_memory(context):
        llama.llama_memory_clear(memory, True)
    batch, at = llama.llama_batch_init(sum(map(len, texts)), 0, 1), 0
    for number, tokens in enumerate(texts):
        for position, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
            at += 1
    batch.n_tokens = at
    if llama.llama_decode(context, batch):
        sys.exit("llama.cpp does not compute it")
    is_rank = llama.llama_pooling_type(context) == llama.LLAMA_POOLING_TYPE_RANK
    width = llama.llama_model_n_cls_out(model) if is_rank else llama.llama_model_n_embd(model)
    found = [llama.llama_get_embeddings_seq(context, number) for number in range(len(texts))]
    llama.llama_batch_free(batch)
    return [np.ctypeslib.as_array(row, (width,)).copy() for row in found]


def score(job: dict) -> None:
    room, answers = len(job["score"][0]), []
    model, context = opened(job["model"], room=room, n_threads=2, n_threads_batch=2)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    for ids, targets in zip(job["score"], job["targets"], strict=True):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        rows = read(context, vocab, ids, 0).astype(np.float64)
        for place in range(room // 2, room - 1):
            row = rows[place] - rows[place].max()
            answers.append(float(np.log(np.exp(row).sum()) - row[targets[place + 1]]))
    llama.llama_free(context)
    llama.llama_model_free(model)
    with open(job["out"], "w") as file:
        json.dump(answers, file)


def tokenize(job: dict) -> None:
    chosen = llama.llama_model_default_params()
    chosen.vocab_only = True
    model = llama.llama_model_load_from_file(job["vocabulary"].encode(), chosen)
    if not model:
        sys.exit(f"llama.cpp does not open {job['vocabulary']}")
    vocab, answers = llama.llama_model_get_vocab(model), []
    for text in job["texts"]:
        data, room = text.encode(), (llama.llama_token * 4096)()
        answers.append([])
        for adds, special in ((False, False), (False, True), (True, True)):
            count = llama.llama_tokenize(vocab, data, len(data), room, 4096, adds, special)
            answers[-1].append(list(room[:count]))
    llama.llama_model_free(model)
    with open(job["out"], "w") as file:
        json.dump(answers, file)


@llama.llama_log_callback
def only_errors(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    llama.llama_log_set(only_errors, ctypes.c_void_p(0))
    llama.llama_backend_init()
    for line in sys.stdin:
        job = json.loads(line)
        kinds = {"texts": tokenize, "read": pool, "score": score}
        kinds.get(next((key for key in kinds if key in job), ""), run)(job)
