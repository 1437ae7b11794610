#!/usr/bin/env python3
"""Run models in llama.cpp, for the scripts that record and measure: the one program here that calls its library.

Needs a Python that has llama-cpp-python; scripts/tools/peer.py starts it. Reads a job per line of stdin, as JSON, whose
"job" names a function below, and writes what it computes to the file "out". All compute with keys and values in
float32, without flash attention and repacked weights, on one thread unless "threads" says otherwise.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp as llama
import numpy as np

CONTEXT, LONG = 128, 256  # the second for more tokens than the first has room for
TEXTS = 8  # of a batch at most; it has to divide CONTEXT
BATCH = 512  # tokens of a run, of pictures and of many sequences


def load(path: str, **settings: object):
    """Open a model; settings: of its parameters. Ends the program if llama.cpp does not open it."""
    chosen = llama.llama_model_default_params()
    chosen.use_extra_bufts, chosen.n_gpu_layers = False, 0
    for name, value in settings.items():
        setattr(chosen, name, value)
    return llama.llama_model_load_from_file(path.encode(), chosen) or sys.exit(f"llama.cpp does not open {path}")


def make_context(model, texts: int = 1, room: int = CONTEXT, threads: int = 1, **settings: object):
    """Make a context for so many texts of `room` tokens each; settings: of its parameters."""
    chosen = llama.llama_context_default_params()
    chosen.n_batch = chosen.n_ubatch = room
    chosen.n_ctx, chosen.n_seq_max = room * texts, texts
    chosen.n_threads = chosen.n_threads_batch = threads
    chosen.type_k = chosen.type_v = 0  # GGML_TYPE_F32
    chosen.flash_attn_type, chosen.offload_kqv, chosen.swa_full = 0, False, True
    for name, value in settings.items():
        setattr(chosen, name, value)
    return llama.llama_init_from_model(model, chosen)


def size_of(model) -> int:
    return llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))


def require(code: int, what: str = "llama.cpp does not compute it") -> None:
    if code:
        sys.exit(what)


def floats_at(place, *shape: int) -> np.ndarray:
    """Return a copy of the floats at an address."""
    return np.ctypeslib.as_array(ctypes.cast(place, ctypes.POINTER(ctypes.c_float)), shape).copy()


def run(context, items: list[tuple[int, int, int, bool]], decode: Callable = llama.llama_decode) -> None:
    """Read (token, position, sequence, whether its logits are wanted) in one batch."""
    batch = llama.llama_batch_init(len(items), 0, 1)
    batch.n_tokens = len(items)
    for i, (token, position, sequence, is_wanted) in enumerate(items):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    require(decode(context, batch))
    llama.llama_batch_free(batch)


def read(context, vocab: int, tokens: list[int], position: int = 0) -> np.ndarray:
    """Read tokens; return the logits after each, float32 [tokens, vocab]."""
    run(context, [(token, position + i, 0, True) for i, token in enumerate(tokens)])
    return np.stack([floats_at(llama.llama_get_logits_ith(context, i), vocab) for i in range(len(tokens))])


def steer(context, vectors: np.ndarray, first: int, last: int) -> None:
    """Add a control vector, float32 [layers - 1, width], to the outputs of layers, from layer 1 on."""
    numbers = vectors.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    require(llama.llama_set_adapter_cvec(context, numbers, vectors.size, vectors.shape[1], first, last))


# ---- jobs


def logits(job: dict[str, Any]) -> None:
    """Write `prefill` [tokens, vocab] of "tokens", `then`, the tokens behind them, and their `decode` [those, vocab].

    "then": those tokens, or how many of the most likely ones. "flash": with flash attention. "encode": what an encoder
    reads before. "vectors", "layers": a control vector, [layers - 1, width], and the first and last layer it changes.
    """
    then = job["then"] if isinstance(job["then"], list) else [None] * job["then"]
    room = CONTEXT if len(job["tokens"]) + len(then) <= CONTEXT else LONG
    model = load(job["model"])
    is_flash = int(job.get("flash", False))
    context = make_context(model, room=room, threads=job.get("threads", 1), flash_attn_type=is_flash)
    vocab = size_of(model)
    if job.get("vectors"):
        steer(context, np.array(job["vectors"], np.float32), *job["layers"])
    if job.get("encode"):
        run(context, [(token, i, 0, True) for i, token in enumerate(job["encode"])], llama.llama_encode)
    prefill = read(context, vocab, job["tokens"])
    last, tokens, decode = prefill[-1], [], []
    for token in then:
        tokens.append(int(last.argmax()) if token is None else token)
        last = read(context, vocab, tokens[-1:], len(job["tokens"]) + len(decode))[0]
        decode.append(last)
    np.savez(job["out"], prefill=prefill, then=np.array(tokens, np.int32), decode=np.array(decode))


def rows(job: dict[str, Any]) -> None:
    """Write `rows` [texts, width], what a model that pools makes of "texts", in one batch or each "alone"."""
    model = load(job["model"])
    context = make_context(model, 1 if job["alone"] else TEXTS, embeddings=True)
    groups = [[text] for text in job["texts"]] if job["alone"] else [job["texts"]]
    np.savez(job["out"], rows=np.stack([row for texts in groups for row in pooled(model, context, texts)]))


def pooled(model, context, texts: list[list[int]]) -> list[np.ndarray]:
    """Return a row of each text of one batch."""
    if memory := llama.llama_get_memory(context):
        llama.llama_memory_clear(memory, True)
    run(context, [(token, i, number, True) for number, text in enumerate(texts) for i, token in enumerate(text)])
    is_rank = llama.llama_pooling_type(context) == llama.LLAMA_POOLING_TYPE_RANK
    width = llama.llama_model_n_cls_out(model) if is_rank else llama.llama_model_n_embd(model)
    return [floats_at(llama.llama_get_embeddings_seq(context, number), width) for number in range(len(texts))]


def score(job: dict[str, Any]) -> None:
    """Write -ln p of each token of the second halves of "targets" behind "texts", as llama-perplexity does."""
    room, answers = len(job["texts"][0]), []
    model = load(job["model"])
    context, vocab = make_context(model, room=room, threads=2), size_of(model)
    for ids, targets in zip(job["texts"], job["targets"], strict=True):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        found = read(context, vocab, ids).astype(np.float64)
        for place in range(room // 2, room - 1):
            row = found[place] - found[place].max()
            answers.append(float(np.log(np.exp(row).sum()) - row[targets[place + 1]]))
    write_json(job, answers)


def tokenize(job: dict[str, Any]) -> None:
    """Write three lists of tokens for each of "texts": plain, with special tokens read in it, and with those added."""
    vocab, answers = llama.llama_model_get_vocab(load(job["model"], vocab_only=True)), []
    for text in job["texts"]:
        data, room = text.encode(), (llama.llama_token * 4096)()
        answers.append([])
        for adds, special in ((False, False), (False, True), (True, True)):
            count = llama.llama_tokenize(vocab, data, len(data), room, 4096, adds, special)
            answers[-1].append(list(room[:count]))
    write_json(job, answers)


def batch(job: dict[str, Any]) -> None:
    """Write {"read": seconds, "all": seconds} of "prompts", answered greedily at once with "tokens" each.

    As llama-batched-bench: all prompts are read, BATCH tokens at a time, then every step takes all one token further.
    """
    prompts, tokens, length = job["prompts"], job["tokens"], len(job["prompts"][0])
    model = load(job["model"], use_extra_bufts=True)
    sizes = {"n_ctx": len(prompts) * ((length + tokens) // 256 + 1) * 256, "n_seq_max": len(prompts)}
    settings = sizes | {"type_k": 1, "type_v": 1, "flash_attn_type": -1, "swa_full": False}  # its defaults
    context, vocab = make_context(model, 1, BATCH, job["threads"], **settings), size_of(model)

    def step(items: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        run(context, items)
        wanted = [(place, item[2]) for place, item in enumerate(items) if item[3]]
        places = ((sequence, llama.llama_get_logits_ith(context, place)) for place, sequence in wanted)
        return {sequence: int(np.ctypeslib.as_array(row, (vocab,)).argmax()) for sequence, row in places}

    step([(1, 0, 0, True)])  # the weights are in memory then
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    items = [(token, i, s, i == length - 1) for s, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
    newest, start = dict[int, int](), time.perf_counter()
    for first in range(0, len(items), BATCH):
        newest |= step(items[first : first + BATCH])
    reading = time.perf_counter() - start
    for number in range(tokens - 1):
        newest = step([(token, length + number, sequence, True) for sequence, token in newest.items()])
    write_json(job, {"read": reading, "all": time.perf_counter() - start})


def pictures(job: dict[str, Any]) -> None:
    """Write `tokens`, -1 for a row of an image, `rows` [rows of all images, width] and the last `logits` [vocab].

    "mmproj"; "images": paths of .npy, uint8 [rows, columns, 3]; "text": with mtmd's marker for each image. With
    "seconds": only those of the second encoding of an image, on average.
    """
    import llama_cpp.mtmd_cpp as mtmd

    model = load(job["model"])
    chosen = mtmd.mtmd_context_params_default()
    chosen.use_gpu, chosen.print_timings, chosen.warmup = False, False, False
    chosen.n_threads = job.get("threads", 1)
    if not job.get("seconds"):
        chosen.flash_attn_type = 0
    eye = mtmd.mtmd_init_from_file(job["mmproj"].encode(), model, chosen) or sys.exit("mtmd does not open it")
    pixels = [np.load(path) for path in job["images"]]
    addresses = [image.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)) for image in pixels]
    bitmaps = [mtmd.mtmd_bitmap_init(*image.shape[1::-1], at) for image, at in zip(pixels, addresses, strict=True)]
    text, chunks = job["text"].encode(), mtmd.mtmd_input_chunks_init()
    given = mtmd.mtmd_input_text(text, len(text), True, True)
    array = (mtmd.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
    require(mtmd.mtmd_tokenize(eye, chunks, ctypes.byref(given), array, len(bitmaps)), "mtmd makes no tokens of it")
    pieces = [mtmd.mtmd_input_chunks_get(chunks, number) for number in range(mtmd.mtmd_input_chunks_size(chunks))]
    images = [piece for piece in pieces if mtmd.mtmd_input_chunk_get_type(piece) == 1]
    if job.get("seconds"):
        for _ in range(2):
            begin = time.perf_counter()
            for image in images:
                require(mtmd.mtmd_encode_chunk(eye, image), "mtmd does not encode it")
            taken = (time.perf_counter() - begin) / len(images)
        return write_json(job, taken)
    tokens, found, width = list[int](), list[np.ndarray](), llama.llama_model_n_embd_inp(model)
    for piece in pieces:
        count = mtmd.mtmd_input_chunk_get_n_tokens(piece)
        if mtmd.mtmd_input_chunk_get_type(piece) == 0:
            tokens += mtmd.mtmd_input_chunk_get_tokens_text(piece, ctypes.byref(ctypes.c_size_t()))[:count]
            continue
        require(mtmd.mtmd_encode_chunk(eye, piece), "mtmd does not encode it")
        found.append(floats_at(mtmd.mtmd_get_output_embd(eye), count, width))
        tokens += [-1] * count
    context, past = make_context(model, room=BATCH, n_ctx=2048), llama.llama_pos(0)
    require(mtmd.mtmd_helper_eval_chunks(eye, context, chunks, 0, 0, BATCH, True, ctypes.byref(past)))
    last = floats_at(llama.llama_get_logits_ith(context, -1), size_of(model))
    np.savez(job["out"], tokens=np.array(tokens, np.int32), rows=np.concatenate(found), logits=last, past=past.value)


# ---- guesses: functions of the library that the package does not declare, some of which are C++ (0.3.36)

HANDLE, INT = ctypes.c_void_p, ctypes.c_int
ENCODE, DECODE, GUESSES = 0, 1, 1


class Embedding(ctypes.Structure):
    """llama_embd."""

    _fields_ = [("data", HANDLE), ("rows", ctypes.c_size_t), ("columns", ctypes.c_size_t)]


def function(name: str, result, *arguments):
    found = getattr(llama.llama_cpp._lib, name)
    found.restype, found.argtypes = result, arguments
    return found


def process(context, kind: int, rows: np.ndarray, tokens: list[int] | None = None) -> None:
    """Encode rows, or read tokens together with the rows before them; float32 [tokens, width]."""
    extended = function("llama_batch_ext_init", HANDLE, HANDLE)(context)
    set_position = function("llama_batch_ext_set_pos", ctypes.c_bool, HANDLE, INT, ctypes.POINTER(ctypes.c_int32))
    set_wanted = function("llama_batch_ext_set_output_logits", ctypes.c_bool, HANDLE, INT, ctypes.c_bool)
    set_before = function("llama_batch_ext_set_embd_token", ctypes.c_bool, HANDLE, INT, Embedding)
    add_row = function("llama_batch_ext_add_embd", INT, HANDLE, INT, Embedding)
    add_token = function("llama_batch_ext_add_token", INT, HANDLE, INT, INT)
    for place, row in enumerate(rows):
        embedding = Embedding(row.ctypes.data, 1, len(row))
        add_row(extended, 0, embedding) if tokens is None else add_token(extended, 0, tokens[place])
        set_position(extended, place, (ctypes.c_int32 * 4)(*4 * [place]))
        set_wanted(extended, place, True)
        if tokens is not None and len(row):
            set_before(extended, place, embedding)
    require(function("llama_process", INT, HANDLE, INT, HANDLE)(context, kind, extended))


def guesses(job: dict[str, Any]) -> None:
    """Write `rows` [tokens, vocab], the logits of the model's layer that guesses, or of the file "head" (EAGLE-3).

    It reads each of "tokens" together with what the model made of the one before, zeros before the first.
    """
    model, tokens = load(job["model"], load_mtp=True), job["tokens"]
    guessing, made = by_head(model, job["head"], tokens) if job["head"] else by_layer(model, tokens)
    process(guessing, DECODE, np.concatenate([np.zeros_like(made[:1]), made[:-1]]), tokens)
    vocab = size_of(model)
    found = [floats_at(llama.llama_get_logits_ith(guessing, place), vocab) for place in range(len(tokens))]
    np.savez(job["out"], rows=np.stack(found))


def reveal(context, *flags: bool) -> None:
    name = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
    function(name, None, HANDLE, ctypes.c_bool, ctypes.c_bool)(context, *flags)


def revealed(context, tokens: int, width: int) -> np.ndarray:
    name = "_Z26llama_get_embeddings_nextnP13llama_context"
    return floats_at(function(name, HANDLE, HANDLE)(context), tokens, width)


def context_for_guesses(model, kind: int, other=None):
    """other: the context of the model that this one guesses for."""
    return make_context(model, ctx_type=kind, ctx_other=other, offload_kqv=True, swa_full=True)


def by_layer(model, tokens: list[int]):
    """Return the context of the model's own layer, and what it goes on with."""
    whole, layer = context_for_guesses(model, 0), context_for_guesses(model, GUESSES)
    for context in (whole, layer):
        reveal(context, True, False)
    process(whole, DECODE, np.zeros((len(tokens), 0), np.float32), tokens)
    return layer, revealed(whole, len(tokens), llama.llama_model_n_embd(model))


def by_head(model, path: str, tokens: list[int]):
    """Return the same of a head in another file."""
    name = "_Z30llama_{}_embeddings_layer_inpP13llama_contextj"
    reveal_layer = function(name.format("set") + "b", None, HANDLE, ctypes.c_uint32, ctypes.c_bool)
    revealed_layer = function(name.format("get"), HANDLE, HANDLE, ctypes.c_uint32)
    whole, other = context_for_guesses(model, 0), load(path, load_mtp=True)
    target = function("_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), HANDLE)
    layers = target(other)[:3]
    for layer in layers:
        reveal_layer(whole, layer, True)
    process(whole, DECODE, np.zeros((len(tokens), 0), np.float32), tokens)
    width = llama.llama_model_n_embd(model)
    inputs = [floats_at(revealed_layer(whole, layer), len(tokens), width) for layer in layers]
    guessing = context_for_guesses(other, 0, whole)
    reveal(guessing, True, True)
    process(guessing, ENCODE, np.ascontiguousarray(np.concatenate(inputs, axis=1)))
    return guessing, revealed(guessing, len(tokens), llama.llama_model_n_embd(other))


def write_json(job: dict[str, Any], answer: object) -> None:
    with open(job["out"], "w") as file:
        json.dump(answer, file)


@llama.llama_log_callback
def only_errors(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode(errors="replace"))


JOBS = {job.__name__: job for job in (batch, guesses, logits, pictures, rows, score, tokenize)}

if __name__ == "__main__":
    llama.llama_log_set(only_errors, ctypes.c_void_p(0))
    llama.llama_backend_init()
    for line in sys.stdin:
        job = json.loads(line)
        JOBS[job["job"]](job)
