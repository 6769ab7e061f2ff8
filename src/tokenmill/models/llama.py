"""The Llama family: Llama 2 and 3, SmolLM2, Mistral.

    x -> norm -> attention -> + -> norm -> gated MLP -> +

Mistral's `sliding_window` holds in every layer.
"""

from __future__ import annotations

from tokenmill.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """What `Decoder` is by default."""
