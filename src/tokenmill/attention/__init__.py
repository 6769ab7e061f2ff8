"""Paged attention over the flat batch.

    backend.py          the protocol a backend implements, and its metadata
    selection.py        which backend is used, and why the others were not
    forward_context.py  how attention layers find their metadata
    reference.py        plain torch, exact for any batching and chunking
    cpu.py              our native kernels
    triton.py           our kernels for NVIDIA GPUs
    flash.py, flashinfer.py, sdpa.py
                        libraries' kernels, faster or slower there, but not exact
    cuda.py             what those for NVIDIA GPUs share
    reasons.py          why a backend cannot serve a layer, in common words

Knows neither models nor the scheduler: only rows of queries, block tables and a cache.
"""
