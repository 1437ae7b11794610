"""Attention over the KV cache on a GPU.

- attend_few.py: for few tokens, in float32, with contexts split into parts (Flash-Decoding)
- attend_many.py: for many tokens, on tensor cores (FlashAttention-2); softmax.py, shared.py: parts of both
- cache_formats.py, cache_loads.py, cache_store.py, cache_recall.py: the cache types, and copies to and from the cache
- select_keys.py, select_key_blocks.py: choose the keys of sparse attention

The query heads that share a key-value head are a "group". Exponentials are powers of 2, for which scores are multiplied
by log2(e).
"""
