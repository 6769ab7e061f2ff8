"""A pooling engine in the server's own process: the real one, stepped by whoever asks."""

from __future__ import annotations

from helpers.fake_engine import FakeEngine
from tokenmill.config.engine_args import EngineArgs
from tokenmill.engine.llm_engine import LLMEngine
from tokenmill.engine.prompts import parse_prompt
from tokenmill.lora_request import LoRARequest


class PoolingEngine(FakeEngine):
    """What `FakeEngine` is asked for, answered by an `LLMEngine`."""

    def __init__(self, path, **settings):
        common = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 40, "max_num_seqs": 8}
        super().__init__()
        self.llm = LLMEngine.from_args(EngineArgs(model=str(path), **(common | settings)))
        self.config = self.llm.config
        self.tokenizer = self.llm.tokenizer
        self.adapters = self.llm._adapters

    async def load_adapter(self, request):
        self.llm.load_adapter(request)
        return self.adapters.get(request.name)

    async def generate(
        self,
        prompt,
        params,
        *,
        request_id,
        priority=0,
        cache_salt=None,
        deadline=None,
        stream=True,
        delta=False,
        adapter=None,
        data_parallel_rank=None,
    ):
        if cache_salt is not None:
            parsed = parse_prompt(prompt)
            text, ids = parsed.text, parsed.token_ids
            form = {"prompt": text} if ids is None else {"prompt_token_ids": ids}
            prompt = {**form, "cache_salt": cache_salt}
        lora = None if adapter is None else LoRARequest(adapter.name, adapter.path)
        self.llm.add_request(request_id, prompt, params, priority=priority, lora_request=lora)
        while True:
            for output in self.llm.step():
                if output.request_id == request_id:
                    yield output
                    return
                self._others[output.request_id] = output
            if request_id in self._others:
                yield self._others.pop(request_id)
                return

    @property
    def _others(self):
        return self.__dict__.setdefault("others", {})
