"""What runs plans: one worker for each device.

    rows.py          everything kept of a running request, at a row for life
    batch.py         one step's flat batch, gathered from the rows
    model_runner.py  the step: prepare, forward, logits, sample, commit
    drafts.py        proposals for the next tokens, and which of them hold
    worker.py        the step again, request by request, if one of them breaks it
    build.py         model, KV cache and runner, put together

Knows plans, never the scheduler that made them.
"""
