"""Recorded steps: the forward pass as a list of kernel calls on fixed buffers, replayed at once.

    forward.py   the interface, the pass without a recording, and both compared
    cpu.py       recording and replay by the native kernels
    decode.py    steps in which every request only decodes, as one native call
    cuda.py      CUDA graphs of a GPU
    build.py     which steps are recorded on a CPU

A recording knows nothing of requests: the buffers of a step are filled first, as always.
"""
