"""`tokenmill route`: one address in front of several OpenAI-compatible servers.

    server      socket, signals, drain            app         paths, keys, ids, errors
    exchange    one request: who gets it, again elsewhere where nothing has come, bytes as they come
    policies    who gets it                       routing_keys  what of a body that is decided by
    backend     what is known of one server       checks      questions to each how it is
    upstream    HTTP/1.1 to one server            metrics     what Prometheus sees
    responses   who has kept a response           disaggregation  a prompt here, tokens there

It knows neither models nor tokens, and keeps no state that it could not do without: a router that
is started again has forgotten who has which prefix, and learns it anew. See docs/data-parallel.md.
"""
