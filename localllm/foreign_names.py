"""The names that other programs give to options and attributes, for messages about unknown ones."""

from typing import NoReturn

# Our names of options, by the names in the APIs of Hugging Face, llama.cpp, vLLM and OpenAI.
ANSWER_NAMES = {
    "max_new_tokens": "max_tokens", "max_length": "max_tokens (without the prompt's)", "n_predict": "max_tokens",
    "num_predict": "max_tokens", "max_completion_tokens": "max_tokens", "min_new_tokens": "ignore_eos",
    "do_sample": "temperature (0 is greedy)", "temp": "temperature", "num_beams": "candidates(prompt, beams=N)",
    "num_return_sequences": "candidates(prompt, n=N)", "n": "candidates(prompt, n=N)",
    "length_penalty": "candidates(prompt, beams=N, length_penalty=X)",
    "best_of": "candidates(prompt, n=N)", "use_beam_search": "candidates(prompt, beams=N)",
    "beams": "candidates(prompt, beams=N)", "repetition_penalty": "repeat_penalty", "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n", "no_repeat_ngram_size": "dry_multiplier", "typical_p": "typical",
    "typ_p": "typical", "mirostat_mode": "mirostat", "stop_strings": "stop", "stop_sequences": "stop",
    "stop_token_ids": "stopping_criteria", "eos_token_id": "stopping_criteria", "bad_words_ids": "ban or logit_bias",
    "bad_words": "ban", "banned_strings": "ban", "logits_processors": "logits_processor", "random_seed": "seed",
    "response_format": "schema", "json_schema": "schema", "guided_json": "schema", "guided_regex": "regex",
    "guided_grammar": "grammar", "structured_outputs": "schema, grammar or regex",
    "output_scores": "top_logprobs", "return_logprob": "logprobs", "n_probs": "top_logprobs",
    "output_hidden_states": "model.hidden_states", "output_attentions": "model.attention",
    "prompt_logprobs": "model.logprobs", "echo": "model.logprobs", "enable_thinking": 'think="on" or "off"',
    "reasoning_effort": "think", "chat_template_kwargs": "template_variables",
    "assistant_model": "speculate", "draft_model": "speculate", "num_speculative_tokens": "speculate",
    "stream": "iteration: an answer is an iterator", "num_ctx": "context of localllm.open",
    "n_ctx": "context of localllm.open", "system": "a first message of the role system",
    "system_prompt": "a first message of the role system", "messages": "the first argument of chat",
}  # fmt: skip
OPEN_NAMES = {
    "n_ctx": "context", "num_ctx": "context", "max_seq_len": "context", "max_model_len": "context",
    "ctx_size": "context", "model_path": "path", "model": "path", "pretrained_model_name_or_path": "path",
    "n_threads": "threads", "num_threads": "threads", "n_threads_batch": "threads", "n_gpu_layers": "gpu_layers",
    "num_gpu": "gpu_layers", "device": "backend", "device_map": "backend", "chat_format": "chat_template",
    "type_k": "kv_type", "type_v": "kv_type", "cache_type_k": "kv_type", "cache_type_v": "kv_type",
    "lora_path": "lora", "lora_scale": "lora={path: scale}", "clip_model_path": "mmproj",
    "rope_freq_base": "rope", "rope_freq_scale": "rope", "rope_scaling": "rope",
    "use_mmap": "leave it out: files are mapped",
    "use_mlock": "leave it out", "n_batch": "leave it out: prompts are read in runs",
    "flash_attn": "leave it out: it is always used",
    "torch_dtype": "leave it out: the file's format is used", "dtype": "leave it out: the file's format is used",
    "seed": "seed of generate or chat", "verbose": "leave it out", "draft_model": "speculate of generate or chat",
    "embedding": "leave it out: use model.embed", "logits_all": "leave it out: use model.logits",
}  # fmt: skip

# Attributes of models in transformers, llama-cpp-python and vLLM.
MODEL_NAMES = {
    "config": "metadata, layers, width, vocab_size and trained_context", "hparams": "metadata",
    "n_vocab": "vocab_size", "n_ctx": "context", "n_ctx_train": "trained_context", "n_embd": "width",
    "n_layer": "layers", "n_layers": "layers", "num_layers": "layers", "num_hidden_layers": "layers",
    "hidden_size": "width", "n_params": "file.parameters", "num_parameters": "file.parameters", "size": "file.nbytes",
    "max_position_embeddings": "trained_context", "max_model_len": "context", "context_length": "context",
    "get_memory_footprint": "memory", "quantization": "format", "dtype": "format", "desc": "arch", "vocab": "tokenizer",
    "parameters": "weight(name) and file.tensors", "named_parameters": "weight(name) and file.tensors",
    "state_dict": "weight(name) and file.tensors", "tensors": "weight(name) and file.tensors",
    "weights": "weight(name) and file.tensors", "get_tensor": "weight(name)", "get_parameter": "weight(name)",
    "get_input_embeddings": 'weight("token_embd.weight")', "get_output_embeddings": 'weight("output.weight")',
    "encode": "tokenize(text)", "decode": "detokenize(ids)", "token_eos": "tokenizer.eos_id",
    "token_bos": "tokenizer.bos_id", "eos_token_id": "tokenizer.eos_id", "bos_token_id": "tokenizer.bos_id",
    "get_tokenizer": "tokenizer", "apply_chat_template": "render(messages)", "chat_template": "tokenizer.chat_template",
    "forward": "logits(ids)", "eval": "logits(ids)", "scores": "logits(ids)", "create_completion": "generate(prompt)",
    "complete": "generate(prompt)", "predict": "generate(prompt)", "invoke": "generate(prompt)",
    "create_chat_completion": "chat(messages)", "create_embedding": "embed(texts)", "embeddings": "embed(texts)",
    "get_embeddings": "embed(texts)", "n_tokens": "count_tokens(text)", "perplexity": "logprobs(text).perplexity",
    "batch_generate": "map(prompts)", "generate_batch": "map(prompts)", "beam_search": "candidates(prompt, beams=N)",
    "register_forward_hook": "hooked(function)", "run_with_hooks": "hooked(function)",
    "run_with_cache": "hidden_states(text)", "n_threads": "localllm.open(..., threads=N)",
    "to": "localllm.open(..., backend=...)", "cuda": "localllm.open(..., backend=...)",
    "cpu": "localllm.open(..., backend=...)", "half": "localllm.open(..., kv_type=...)", "model_path": "path",
    "name_or_path": "path", "filename": "path", "load_lora": "localllm.open(..., lora=...)",
    "load_adapter": "localllm.open(..., lora=...)", "save_pretrained": "`localllm quantize`",
}  # fmt: skip
TOKENIZER_NAMES = {
    "tokenize": "encode(text)", "detokenize": "decode(ids)", "batch_decode": "decode(ids)",
    "batch_encode": "encode(text)",
    "convert_ids_to_tokens": "pieces[id]", "id_to_token": "pieces[id]", "id_to_piece": "pieces[id]",
    "convert_tokens_to_ids": "get_special_id(text) or pieces.index(text)",
    "token_to_id": "get_special_id(text) or pieces.index(text)", "get_vocab": "pieces", "vocab": "pieces",
    "get_vocab_size": "vocab_size", "n_vocab": "vocab_size", "vocabulary_size": "vocab_size",
    "eos_token_id": "eos_id", "bos_token_id": "bos_id", "eos_token": "pieces[eos_id]", "bos_token": "pieces[bos_id]",
    "all_special_ids": "control_ids", "apply_chat_template": "Model.render(messages)",
    "from_pretrained": "from_file(path)",
}  # fmt: skip
GENERATION_NAMES = {
    "choices": "text", "content": "text", "output_text": "text", "generated_text": "text",
    "response": "text", "outputs": "text", "token_ids": "tokens", "ids": "tokens", "sequences": "tokens",
    "usage": "prompt_tokens and completion_tokens", "reasoning_content": "thinking", "reasoning": "thinking",
    "tool_calls": "calls", "stop_reason": "finish_reason", "json": "to_dict()", "model_dump": "to_dict()",
}  # fmt: skip


def describe_foreign_name(name: str, names: dict[str, str]) -> str:
    """Return a hint about another program's name for an option, "" for an unknown name."""
    ours = names.get(name.lower(), "")
    return f"; {ours}" if ours.startswith("leave it out") else f"; here it is {ours}" if ours else ""


def refuse_attribute(instance: object, name: str, names: dict[str, str]) -> NoReturn:
    """Raise AttributeError for an unknown attribute, with ours for another program's name."""
    message = f"{type(instance).__name__!r} object has no attribute {name!r}"
    if ours := names.get(name):
        raise AttributeError(f"{message}; here it is {ours}")
    raise AttributeError(message, name=name, obj=instance)  # Python suggests similar names
