"""Measurements of an engine, each beside the limit of the machine it runs on.

    options.py    what may be set; the flags of `tokenmill bench`
    limits.py     what the machine can do: reading memory, multiplying
    cost.py       bytes and operations that a step needs
    recorder.py   what an engine's steps computed, and how long they took
    serving.py    requests through an engine: latency and throughput
    kernels.py    each kernel by itself
    startup.py    from nothing to the first token, in a process of its own

Knows nothing of tables and flags (`cli/bench.py`); every figure is a dataclass that can be JSON.
"""
