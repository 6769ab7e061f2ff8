"""Logits processors that another process can find by name."""

from __future__ import annotations

import sys

from tokenmill import LogitsProcessor


class Only(LogitsProcessor):
    """`extra_args={"only": 7}` leaves one token."""

    @classmethod
    def validate_params(cls, params):
        only = (params.extra_args or {}).get("only", 0)
        if not isinstance(only, int):
            raise ValueError(f"only={only!r} must be a token id.")

    def for_request(self, params):
        only = (params.extra_args or {}).get("only")
        if only is None:
            return None

        def edit(prompt_ids, output_ids, logits):
            kept = logits[only].clone()
            logits.fill_(-float("inf"))
            logits[only] = kept

        return edit


class Failing(LogitsProcessor):
    """`extra_args={"fails": "everywhere"}` fails, `"rank 1"` in the process of that rank only."""

    def for_request(self, params):
        fails = (params.extra_args or {}).get("fails")
        if fails is None:
            return None

        def edit(prompt_ids, output_ids, logits):
            is_rank = "rank_process" in sys.argv[0]
            if len(output_ids) == 3 and (fails == "everywhere" or (is_rank and sys.argv[2] == "1")):
                raise ZeroDivisionError("the processor divides by zero")

        return edit
