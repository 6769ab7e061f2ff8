"""Text to token ids and back.

    tokenizer.py        `Tokenizer`, and `load_tokenizer` for any checkpoint
    decoding.py         ids to text, whole or token by token
    from_directory.py   tokenizer.json and its companions
    from_gguf.py        the tables in a GGUF file's metadata
    pre_tokenizers.py   how each kind of byte-level vocabulary splits text into words

Knows nothing of requests, chats or engines.
"""
