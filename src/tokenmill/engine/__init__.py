"""From a user's prompt to the core, and from the core's tokens to text.

    input_processor.py   prompt and parameters -> EngineCoreRequest; the last place of a user error
    core.py              the one loop: schedule, execute, sample, settle
    detokenizer.py       ids -> text, stop strings
    output_processor.py  EngineCoreOutput -> RequestOutput
    llm_engine.py        these together, stepped by the caller
    client.py            one interface to the core, in this process or another
    build.py             a model's name -> an engine
    workers.py           the workers of its core, and the executor that carries plans to them

Served, with the core in a process of its own:

    async_llm.py         what a server sees: streams, limits, health
    served_requests.py   every unfinished request, over the deaths of cores
    recovery.py          who enters a new core first, and when it is enough
    supervisor.py        one core process at a time, watched
    core_client.py       that process, its socket and its end
    core_process.py      what runs in it; lifeline.py ties it to its parent
    status_page.py       memory that both share: signs of life, steps under way
    wire.py              the messages between them

Loads no torch before an engine is built; the front end of a server never does.
"""
