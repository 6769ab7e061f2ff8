"""Models on disk: where they are found, and what their files say.

    names.py        a user's word for a model -> a path on this machine
    aliases.py      short names, and where their files come from
    checkpoint.py   one face for every file format: config, tensors, tokenizer data
    gguf_*.py, hf_directory.py   the formats

Whatever the format, configuration and tensor names read as in a Hugging Face directory. Nothing
here imports torch before a tensor is read.
"""
