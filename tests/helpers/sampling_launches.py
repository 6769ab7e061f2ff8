"""Launches of the GPU's sampler without a GPU, as a program: prints, for the warm-up and for each
step behind it, how many compiled variants each kernel has then.
"""

from __future__ import annotations

import json

import numpy as np
import torch

from helpers.sampling import metadata_of, new_request
from helpers.triton_launches import compile_launches
from tokenmill.sampling.gpu import GpuSampler
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.worker.inputs.staging import Results, Staging

VOCAB_SIZE = 8192
WISHES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {
        "temperature": 1.0,
        "top_p": 0.5,
        "logprobs": 2,
        "frequency_penalty": 0.5,
        "logit_bias": {5: 1.0},
        "allowed_token_ids": [1, 2, 3],
    },
]


def main() -> None:
    cpu = torch.device("cpu")
    num_variants = compile_launches()
    sampler = GpuSampler(
        Staging(cpu).stage, Results(cpu).fetch, max_num_rows=80, vocab_size=VOCAB_SIZE, device=cpu
    )
    sampler.warm_up()
    print(json.dumps(num_variants))
    for n in (1, 2, 3, 16, 63, 64, 80):
        for wishes in WISHES:
            requests = [
                new_request(row, min_tokens=row % 2, stop_token_ids=(3, 4, 5), **wishes)
                for row in range(n)
            ]
            masked = np.unique([0, n - 1])
            words = np.zeros((len(masked), VOCAB_SIZE // 32), np.int32)
            grammar = GrammarMask(masked, words)
            metadata = metadata_of(requests, VOCAB_SIZE, grammar=grammar)
            sampler.forward(torch.zeros(n, VOCAB_SIZE), metadata)
            print(json.dumps(num_variants))


if __name__ == "__main__":
    main()
