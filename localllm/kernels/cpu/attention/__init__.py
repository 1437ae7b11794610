"""Attention over the KV cache on a CPU.

- plan.py: divides a run's attention into units, once for all layers of the same shape
- attend.py: computes units block by block, with online softmax
- products.py: the two matrix products, for few and for many rows (amx/attention.py in AMX tiles)
- cache.py: the cache types, and copies to and from the cache
- select_keys.py: chooses the keys of sparse attention

Rows: the query heads that share a key-value head (a "group") are rows of one matrix, row = token * group + head in
group. A unit of work is up to 96 such rows of one sequence, one key-value head and a range of keys. A block of keys is
a page, 64 keys. "Padded" dimensions are rounded up to 16.
"""
