"""Model families, one file each, and how their weights get in.

    base.py      the protocol every model follows
    registry.py  architecture name -> class, imported when asked for
    loader.py    checkpoint -> parameters
    config.py    what most families read from a config.json
    decoder.py   embedding, stack, norm and head of most families, and the parts of their layers
    llama.py     ...

A model is a plain `nn.Module` tree of our layers; it knows nothing of requests or scheduling.
"""
