"""Blocks of the KV cache as numbers: who holds which, and which hold a prefix worth keeping.

    manager.py     what the scheduler asks for: hits, slots, caching, release
    groups.py      block tables, one per request in each KV cache group
    block_pool.py  reference counts, the free list, cached blocks by hash
    hashing.py     the key of a full block

Nothing here touches memory; the workers own the tensors.
"""
