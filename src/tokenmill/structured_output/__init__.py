"""Text of a given form: which tokens may come next, so that the whole fits a schema or grammar.

    backend.py             the protocol: compile a form to a grammar, follow a request through it
    llguidance.py          the default backend
    xgrammar.py            the other one
    json_schema.py         what of JSON schema is enforced, and what is refused
    structural_tag.py      free text with parts of a given form in it
    request_grammar.py     one request: matcher, end of reasoning, forced tokens
    compiler.py            grammars are compiled in threads, within bounds
    manager.py             all requests of an engine, and the masks of a step

Knows tokens and masks; no torch, no scheduler, no model.
"""
