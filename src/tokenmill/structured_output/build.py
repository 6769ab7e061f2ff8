"""The manager of an engine, and which backend it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.seams import GrammarManager
from tokenmill.errors import ConfigError
from tokenmill.structured_output.backend import GrammarBackend
from tokenmill.structured_output.manager import StructuredOutputManager
from tokenmill.tokenizer.tokenizer import Tokenizer

MakeBackend = Callable[..., GrammarBackend]


def _llguidance(**settings: object) -> GrammarBackend:
    from tokenmill.structured_output.llguidance import LLGuidanceBackend

    return LLGuidanceBackend(**settings)  # type: ignore[arg-type]


def _xgrammar(**settings: object) -> GrammarBackend:
    from tokenmill.structured_output.xgrammar import XGrammarBackend

    return XGrammarBackend(**settings)  # type: ignore[arg-type]


BACKENDS: Mapping[str, MakeBackend] = {"llguidance": _llguidance, "xgrammar": _xgrammar}
"""By the names of `config.structured_outputs.BACKENDS`; their libraries are loaded when used."""


def build_grammars(
    config: EngineConfig,
    read_tokenizer: Callable[[], Tokenizer | None],
    end_token_ids: Callable[[Tokenizer], Sequence[int]],
) -> GrammarManager:
    """The manager; its backend is built when the first request needs it.

    `read_tokenizer` gives the engine's tokenizer, `end_token_ids` the ids that end a text. Both are
    called from another thread.
    """

    def make_backend() -> GrammarBackend:
        tokenizer = read_tokenizer()
        if tokenizer is None:
            raise ConfigError("structured outputs need a tokenizer, and the engine has none")
        eos_token_ids = end_token_ids(tokenizer)
        if not eos_token_ids:
            raise ConfigError("structured outputs need a model with an end token")
        return BACKENDS[config.structured_outputs.backend](
            tokenizer=tokenizer,
            vocab_size=config.model.vocab_size,
            eos_token_ids=eos_token_ids,
            num_threads=config.num_threads,
        )

    settings = config.structured_outputs
    if config.sampling.logits_processors:  # they are to see every token before it is chosen
        settings = replace(settings, enable_forced_tokens=False)
    return StructuredOutputManager(settings, make_backend, vocab_size=config.model.vocab_size)
