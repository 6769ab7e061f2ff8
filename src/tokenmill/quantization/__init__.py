"""Weights in fewer bits than they compute in.

    dequantize.py      a stored tensor of any supported format -> a plain one
    four_bit.py        four-bit block types taken apart, for the GPU
    packed_blocks.py   blocks as the native kernels read them

Knows bytes and block layouts; nothing of models or files.
"""
