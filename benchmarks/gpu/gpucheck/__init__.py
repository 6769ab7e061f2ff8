"""The parts of `check.py`.

report.py      rows of results: JSON, a table, Markdown
timing.py      seconds on a device
models.py      shapes of real models, on random weights, and what a step of them costs at least
driving.py     an engine stepped by hand, and where its host's time goes
limits.py      what the card can do
kernels.py     every kernel beside its reference
decode.py      tokens a second, step by step
prefill.py     prompts
exactness.py   the reference's results; the same bits however a request is computed
"""
