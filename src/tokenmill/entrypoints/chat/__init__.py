"""Conversations to prompts.

    render.py      `render_chat`: messages to text and ids, the one way for every entry point
    messages.py    checks messages and brings what means the same into one form
    contents.py    their contents: text and images
    marks.py       where images stand in the prompt
    call_forms.py, content_forms.py  what a template wants of calls and contents
    system_turns.py  system messages where a template takes them
    templates.py   compiles and renders chat templates
    sandbox.py     the environment they run in, and its limits

A template comes with a model or from a user and is not trusted: it sees plain data only.
"""
