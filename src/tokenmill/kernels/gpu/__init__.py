"""Kernels of the CUDA path, in Triton, each beside its torch reference.

Nothing outside this package imports triton, and nothing imports this package before a model is
built for a GPU. A kernel allocates nothing and reads no device value on the host, so that it can be
captured in a graph and replayed with other contents. Padded requests have no tokens, padded tokens
the slot -1: they write nowhere.
"""
