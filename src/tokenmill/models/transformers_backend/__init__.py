"""Decoders without a family of their own, run by the code that transformers has for them.

    library.py      the library, its class for an architecture, and what is refused by name
    layers.py       our linear layers, embeddings, experts and tables of angles in its modules
    experts.py      matrices of experts, packed one by one
    ops.py          torch's functions as its modules call them, with the same bits in any batch
    interface.py    our attention behind its attention interface; whose mask is whose
    probe.py        one small pass without weights, which finds the attention layers
    checkpoint.py   a checkpoint under the names of its modules
    model.py        all of that as a `CausalLM`
    load.py         a checkpoint to a model

Nothing here is imported unless a model needs it, and transformers is not before `library.py` is
asked for it. See docs/adr/0020.
"""
