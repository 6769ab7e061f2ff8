"""Kernels, each a pure function with plain torch as its reference.

    linear.py      x @ weight.T + bias, exact for any number of rows
    norm.py        RMSNorm
    activation.py  gated activations
    rotary.py      rotary position embedding

The rule they all keep: a row's result has the same bits whatever the other rows are, and wherever
it stands among them. Knows neither layers nor models.
"""
