"""Anthropic's Messages: requests become chats, and what chats answer becomes messages.

    protocol.py      bodies of requests and answers
    translation.py   a request as a chat
    turns.py         its messages: blocks to the messages of a chat
    frames.py        an answer's blocks as events of a stream
    endpoints.py     POST /v1/messages, POST /v1/messages/count_tokens

Nothing here generates: that is the job of `chat.py`.
"""
