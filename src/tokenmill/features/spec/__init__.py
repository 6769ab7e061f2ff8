"""Speculation: drafts of the next tokens, for a step to check several at once.

    acceptance.py   how often a request's drafts hold
    lengths.py      how many drafts are worth their time: what a step costs by its tokens
    depths.py       the same where drafts are made in passes
    lookup.py       drafts from the request's own tokens, or from those of all
    draft_model.py  drafts of a smaller model
    draft_head.py   drafts of a head that reads the model's hidden states
    build.py        the drafter that the settings ask for

Whatever is proposed here, results are the same (`worker/drafts.py`): so all of it may depend on
clocks and on other requests. Knows neither scheduler nor runner.
"""
