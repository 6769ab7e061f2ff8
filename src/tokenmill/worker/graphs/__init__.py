"""Recorded steps: the forward pass as a list of kernel calls on fixed buffers, replayed at once.

    forward.py   the interface, the pass without a recording, and both compared
    cpu.py       recording and replay by the native kernels

A recording knows nothing of requests: the buffers of a step are filled first, as always.
"""
