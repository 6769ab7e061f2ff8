"""Low-rank adapters: requests that run on changed weights, side by side in one batch.

    slots.py      host: which requests may start
    peft.py       host: an adapter's directory, and what it must not ask for
    sites.py      device: the layers of a model that adapters can change
    adapter.py    device: an adapter's tensors, checked against these layers
    tables.py     device: the layers' slots, and the calls that read them
    adapters.py   device: which adapters are kept, and which slot each row uses
    build.py      device: all of these for a model

Nothing here knows the scheduler or the runner: the first asks `AdapterSlots` by way of
`core/adapters.py`, the second tells `Adapters` each plan.
"""
