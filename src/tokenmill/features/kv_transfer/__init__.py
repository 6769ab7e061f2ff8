"""KV outside the pool: kept on disk or in the host's memory, or fetched of another engine.

    build.py        what a worker gets, from the settings
    identity.py     the root of block hashes: equal where KV of equal tokens has equal bytes
    pool_blocks.py  blocks of the pool as bytes
    disk.py         a directory of blocks that engines share and that outlives them
    memory.py       blocks of a GPU's pool in the host's memory
    peers.py        blocks over TCP between engines; messages.py: what they say
    transfer.py     `KVTransfer`: jobs in threads of their own

The host half, which decides what is loaded and saved, is `core/kv/transfers.py`.
"""
