"""Settings, three kinds of them, in one direction:

    engine_args.py    what a user may set: every flag and keyword, with `None` for "choose for me"
    resolve.py        the only place where "choose for me" becomes a value, each with its reason
    engine_config.py  what the engine runs with: frozen, complete, no None that means "auto"

`machine.py` reads what the machine offers; `memory.py` is the arithmetic of the memory ledger.
"""
