"""tokenmill: python run_tokenmill.py MODEL KV_DTYPE WORKLOADS REPEATS"""

from __future__ import annotations

import sys
import time

from workloads import chosen, measure, report


def main(model: str, kv_cache_dtype: str, workloads: str, repeats: str) -> None:
    begin = time.perf_counter()
    import tokenmill
    from tokenmill import LLM, SamplingParams

    with LLM(
        model,
        device="cpu",
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
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
