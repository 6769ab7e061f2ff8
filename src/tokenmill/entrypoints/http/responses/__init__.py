"""OpenAI's Responses: items become a chat, and what the chat answers becomes items.

    protocol.py      bodies of requests and answers
    items.py         items of the input as the messages of a chat
    tools.py         tools and choices, custom ones among them
    translation.py   a request as a chat
    output.py        an answer's blocks as items, and the response around them
    events.py        the same as events of a stream
    job.py           one request
    background.py    responses that are computed while nobody waits
    store.py         responses that are kept for later requests, in SQLite
    endpoints.py     POST /v1/responses and what can be done with a response that is kept

Nothing here generates: that is the job of `chat.py`.
"""
