"""The messages and protocols between the parts. Read these first.

    request.py   front end <-> engine core      EngineCoreRequest, EngineCoreOutput
    plan.py      scheduler  -> workers          SchedulerOutput
    result.py    workers    -> scheduler        ModelRunnerOutput
    kv_cache.py  model      -> scheduler, pool  KVCacheSpec, KVCacheConfig
    seams.py     protocols that features and executors implement

This package knows neither torch nor any part that sends or receives its messages.
"""
