"""Steps of models that pool: a prompt's hidden states become a vector or scores, and no token is
sampled.

    states.py    what a request keeps of the tokens it has computed so far
    pooler.py    from that to its result
    runner.py    the step
    build.py     wiring
"""
