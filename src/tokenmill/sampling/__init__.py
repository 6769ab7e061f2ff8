"""From logits to tokens.

    row_params.py    what each row asks for, as columns of a table
    metadata.py      the columns of one step's logits
    sampler.py       the order of things
    gpu.py           the same on a GPU, which nobody waits for
    grammar_mask.py  which tokens a grammar allows
    transforms.py    edits of the logits before the choice; one class each
    random.py        noise as a pure function of (seed, position, token id)
    logprobs.py      raw log-probabilities of the rows that ask

Knows logits and rows, neither models nor requests under way. A row's result never depends on the
rows beside it.
"""
