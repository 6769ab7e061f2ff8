"""From logits to tokens.

    row_params.py    what each row asks for, as columns of a table
    row_edits.py     what rows ask of their logits beside that
    metadata.py      the columns of one step's logits
    sampler.py       the order of things
    grammar_mask.py  which tokens a grammar allows
    edits.py         edits of the logits before the choice; one class each
    choosers.py      the choice: the best token, or one drawn at random
    transforms.py    filters of what is drawn from; one class each
    random.py        noise as a pure function of (seed, position, token id)
    logprobs.py      log-probabilities of the rows that ask
    gpu*.py          the same on a GPU, which nobody waits for

Knows logits and rows, neither models nor requests under way. A row's result never depends on the
rows beside it.
"""
