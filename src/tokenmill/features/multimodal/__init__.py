"""Images beside text.

    images.py       host: from an image of a request to what the core is sent, once for a content
    decoding.py     host: files, arrays and pillow's images to RGB, within limits
    fetching.py     host: images by URL, from where the operator allows it
    hashing.py      host: names of contents
    limits.py       host: what one prompt may bring in all
    processing.py   host: what a family does to an image, and the registry of families
    processors/     host: one file a family
    build.py        host: all of these for a model
    embedder.py     device: embeddings of images over those of their placeholders

The host half loads no torch: it runs in the process of the HTTP server. Nothing here knows the
scheduler or the runner.
"""
