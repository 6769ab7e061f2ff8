"""tokenmill: python run_tokenmill.py MODEL KV_DTYPE [SETTINGS] WORKLOADS REPEATS

SETTINGS is a JSON object of more arguments of the engine.
"""

from __future__ import annotations

import json
import sys
import time

from workloads import chosen, measure, report


def main(model: str, kv_cache_dtype: str, *rest: str) -> None:
    *settings, workloads, repeats = rest
    begin = time.perf_counter()
    import tokenmill
    from tokenmill import LLM, SamplingParams

    with LLM(
        model,
        device="cpu",
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
        **json.loads("".join(settings) or "{}"),
    ) as llm:
        start_seconds = time.perf_counter() - begin

        def generate(prompts: list[list[int]], output_len: int) -> int:
            params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        found = measure(generate, chosen(workloads), int(repeats))
    report(f"tokenmill {tokenmill.__version__}", start_seconds, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
