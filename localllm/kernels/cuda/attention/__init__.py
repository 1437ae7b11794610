"""Attention over the KV cache on a GPU.

- attend_few.py: for few tokens, in float32, with contexts split into sections (Flash-Decoding)
- attend_many.py: for many tokens, on tensor cores (FlashAttention-2); shared.py: functions of both
- cache.py: the cache types, and copies to and from the cache
- select_keys.py: selects the keys of sparse attention

The query heads that share a key-value head are a "group". Exponentials are powers of 2, for which scores are multiplied
by log2(e).
"""
