"""Many engines on a clock that only the simulation moves: the real scheduler and KV cache, and a
model of what a step costs in place of the workers.

    workload.py     which requests come when, and what their prompts share
    worker.py       one engine: its scheduler, and steps that take the time of a cost model
    cruise.py       many steps at once, where all that happens is that each request gets a token
    routing.py      which worker takes a request
    simulation.py   the clock: arrivals and ends of steps, in their order
    cost.py         seconds of a step, from a machine's figures, or fitted to measured steps
    report.py       what came of it
    search.py       the largest rate, or the fewest workers, that keep their goals

Knows `core`, `contracts` and `config`, and where an engine with several cores sends a request
(`engine/prefix_index.py`); no model, no torch.
"""
