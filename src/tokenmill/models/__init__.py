"""Model families, one file each, and how their weights get in.

    base.py      the protocol every model follows
    registry.py  architecture name -> class, imported when asked for
    loader.py    checkpoint -> parameters
    llama.py     ...

A model is a plain `nn.Module` tree of our layers; it knows nothing of requests or scheduling.
"""
