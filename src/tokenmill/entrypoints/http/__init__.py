"""The HTTP server: OpenAI's protocol in front of an engine.

    server.py        sockets, signals, start and end
    app.py           routes and middleware
    state.py         what all requests share; admission
    protocol.py      request bodies          replies.py   response bodies
    field_types.py   fields that request bodies of several protocols share
    body.py          bytes -> a checked request
    prompts.py       text, ids or messages -> token ids, off the event loop
    sampling.py      request fields -> SamplingParams
    generation.py    outputs of one or several prompts, merged; failures
    messages/, responses/   Anthropic's Messages and OpenAI's Responses, both as chats
    blocks.py        an answer as a list of blocks, for these two
    renames.py, error_shapes.py   their errors, in their words and shapes
    batch.py         files of requests, without a socket
    completions.py, chat.py, models.py, tokenization.py, health.py, admin.py, pages.py   endpoints
    sse.py           a stream on the wire: frames, keep-alive, disconnects
    metrics.py       what Prometheus sees

Nothing here runs per token but `sse.py` and the frame writers of the streaming endpoints.
"""
