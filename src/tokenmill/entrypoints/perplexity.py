"""Perplexity of a model on a short text: a quick look at what a setting costs in quality."""

from __future__ import annotations

import math
from typing import Any

from tokenmill.entrypoints.llm import LLM
from tokenmill.errors import InvalidRequestError
from tokenmill.sampling_params import SamplingParams

QUALITY_TEXT = """\
A river that runs through flat country does not keep to one bed. Where the current is quick it takes
soil from the bank, and where it is slow it lets the soil fall again, so each bend grows wider year
by year until the water finds a shorter way across its neck. The old bend is left behind as a lake
in the shape of a horseshoe. Farmers who settled there learned early that the richest ground was
also the least certain: a field of wheat might stand on the left side of the river in spring and on
the right side after a wet autumn, and the map in the town hall was never quite true.

In the middle of the last century the engineers came. They measured the depth of the channel, drove
long rows of piles, and built two walls of stone that were meant to hold the river where it was.
For some years this went well. Barges could pass at any season, and the price of coal in the towns
upstream fell by a third. But water that cannot spread out has to rise. In the third winter a flood
that would once have covered the meadows to the height of a hand came down between the walls as a
wave, and took the bridge at the lower mill with it.

What was done next was less expensive and took longer. The walls were opened at five places, and the
land behind them was bought and left to the reeds. When the river rises now, it fills these basins
first, and they give the water back in the weeks that follow. The fish have returned, and so have
people who watch birds. Asked whether the work had been worth its cost, the oldest of the engineers
answered with a question: "If a thing wants to move, do you hold it, or do you leave it room?"

To find out how much water such a basin holds, multiply its area by the mean depth at which it
overflows. A basin of 40 hectares that is filled to a depth of 1.5 metres holds 600,000 cubic
metres. If the river brings 200 cubic metres more in each second than the channel can carry, the
basin is full after 3,000 seconds, which is 50 minutes. Five of them, one after the other, gain
about four hours: enough for the top of most floods to pass.

def hours_gained(areas_in_hectares, depth_in_metres, surplus):
    volume = sum(areas_in_hectares) * 10_000 * depth_in_metres
    return volume / surplus / 3600
"""
"""Prose, figures and a little code; written for this purpose, so that no model has seen it."""


def perplexity(text: str = QUALITY_TEXT, **engine_args: Any) -> float:
    """Perplexity of the model, with these settings of `EngineArgs`, on `text`.

    Its tokens but the first are predicted from those before them, as far as the context goes.
    Raises what `LLM` does, and `InvalidRequestError` for a text of fewer than two tokens.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(**{"enable_prefix_caching": False, "max_num_seqs": 1, **engine_args}) as llm:
        tokenizer = llm.llm_engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("Perplexity needs a tokenizer.", parameter="text")
        longest = llm.llm_engine.config.model.max_model_len - 1
        ids = tokenizer.encode(text)[:longest]
        if len(ids) < 2:
            raise InvalidRequestError("text must have at least two tokens.", parameter="text")
        (output,) = llm.generate([ids], params, use_tqdm=False)
    places = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
    logprobs = [place[token].logprob for token, place in places if place]
    return math.exp(-sum(logprobs) / len(logprobs))
