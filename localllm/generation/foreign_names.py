"""The names that other programs give to options, for messages about unknown ones."""

# What to write here instead, by the name in Hugging Face's, llama.cpp's, vLLM's or OpenAI's API.
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
    "n_ctx": "context of localllm.open",
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


def describe_foreign_name(name: str, names: dict[str, str]) -> str:
    """Return a hint about another program's name for an option, "" for an unknown name."""
    ours = names.get(name.lower(), "")
    return f"; {ours}" if ours.startswith("leave it out") else f"; here it is {ours}" if ours else ""
