"""From a user's prompt to the core, and from the core's tokens to text.

    input_processor.py   prompt and parameters -> EngineCoreRequest; the last place of a user error
    core.py              the one loop: schedule, execute, sample, settle
    detokenizer.py       ids -> text, stop strings
    output_processor.py  EngineCoreOutput -> RequestOutput
    llm_engine.py        these together, stepped by the caller
    build.py             a model's name -> an engine

Loads no torch before an engine is built.
"""
