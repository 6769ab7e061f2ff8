"""The engine's brain: which request computes how many tokens in the next step.

    scheduler.py  the step: running first, then waiting; settling results
    step.py       one plan while it is made and while it is in flight
    request.py    a request as a state machine
    queues.py     waiting requests, and who gives way (`policy.py`)
    admission.py  what may be queued, and what may start
    kv/           blocks of the KV cache, shared prefixes
    build.py      the only place where features are wired in

It knows token ids, counts and block numbers. It must not know torch, text, or any device.
"""
