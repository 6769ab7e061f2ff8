"""An engine whose answers can be computed by hand: it says the prompt's words again, in capitals,
one word a token and one token a step."""

from __future__ import annotations

from tokenmill.errors import InvalidRequestError
from tokenmill.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tokenmill.sampling_params import RequestOutputKind, SamplingParams


class FakeRequest:
    def __init__(self, request_id, text, params):
        self.request_id = request_id
        self.text = text
        self.params = params
        self.words = text.upper().split(" ")[: params.max_tokens]
        self.num_done = 0

    def next_output(self, now):
        """The next word as a delta, or all words at once when they are done, or nothing."""
        self.num_done += 1
        finished = self.num_done == len(self.words)
        if self.params.output_kind is RequestOutputKind.DELTA:
            shown = range(self.num_done - 1, self.num_done)
        elif finished:
            shown = range(self.num_done)
        else:
            return None
        text = " ".join(self.words[i] for i in shown)
        if shown.start > 0:
            text = " " + text
        cut = self.params.max_tokens is not None and len(self.words) == self.params.max_tokens
        reason = ("length" if cut else "stop") if finished else None
        if finished and "BOOM" in self.words:
            reason = "error"
        return self._output(text, list(shown), reason, now)

    def aborted(self):
        return self._output("", [], "abort", float(self.num_done))

    def _output(self, text, token_ids, reason, now):
        outputs = [
            CompletionOutput(
                index,
                text,
                token_ids,
                finish_reason=reason,
                error="it went boom" if reason == "error" else None,
            )
            for index in range(self.params.n)
        ]
        metrics = RequestMetrics(0.0, 0.0, 1.0, max(now, 1.0))
        prompt_ids = list(range(len(self.text.split(" "))))
        return RequestOutput(
            self.request_id, self.text, prompt_ids, outputs, reason is not None, metrics=metrics
        )


class FakeEngine:
    summary = "fake: capitals, 1 thread"
    tokenizer = None

    def __init__(self, interrupt_at):
        self.requests = {}
        self.aborted = []
        self.prompts = []
        self.params = []
        self.lora_requests = []
        self.num_steps = 0
        self.interrupt_at = interrupt_at

    def add_request(self, request_id, prompt, params, *, lora_request=None):
        text = prompt if isinstance(prompt, str) else prompt["prompt"]
        if text == "too long":
            raise InvalidRequestError("prompt: too long.", parameter="prompt")
        self.prompts.append(prompt)
        self.params.append(params)
        self.lora_requests.append(lora_request)
        self.requests[request_id] = FakeRequest(request_id, text, params)

    def step(self):
        self.num_steps += 1
        if self.num_steps == self.interrupt_at:
            raise KeyboardInterrupt
        outputs = [request.next_output(float(self.num_steps)) for request in self.requests.values()]
        for output in outputs:
            if output is not None and output.finished:
                del self.requests[output.request_id]
        return [output for output in outputs if output is not None]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def abort_request(self, request_ids):
        self.aborted += request_ids
        return [self.requests.pop(i).aborted() for i in request_ids if i in self.requests]


class FakeLLM:
    """Keeps what it was asked: `engine_args`, `conversations`, and `llm_engine.params`."""

    def __init__(self, interrupt_at=None, **engine_args):
        given = engine_args.get("reasoning_parser", "auto")
        self.reasoning_parser = None if given == "auto" else given
        on_progress = engine_args.pop("on_progress")
        for done in (0, 1_500_000, 3_000_000):
            on_progress("load", done, 3_000_000)
        self.engine_args = engine_args
        self.llm_engine = FakeEngine(interrupt_at)
        self.conversations = []
        self.closed = False

    def chat_prompt(self, messages):
        self.conversations.append([dict(message) for message in messages])
        content = messages[-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        return {"prompt": text, "prompt_token_ids": [0]}

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.25, top_k=7)

    def close(self):
        self.closed = True
