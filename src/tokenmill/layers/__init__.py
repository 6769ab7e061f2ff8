"""Building blocks of models. Each layer owns its fusions: a norm takes and returns the residual,
a gated MLP owns its activation, attention owns RoPE and the KV write.

The residual stream is float32 whatever the activations' dtype.
"""
