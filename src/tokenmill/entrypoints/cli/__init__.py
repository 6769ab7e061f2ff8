"""The command line.

    main.py          the commands, exit codes, how errors are shown
    flags.py         flags derived from `EngineArgs` and `SamplingParams`
    session.py       an engine for one command: loading, parameters, running requests, figures
    progress.py      bars on stderr
    generate.py  chat.py  models.py  collect_env.py     one command each, imported when called

Text goes to stdout, everything else to stderr. `--help` must stay fast, so nothing here imports
torch, the engine, or `huggingface_hub` at module level.
"""
