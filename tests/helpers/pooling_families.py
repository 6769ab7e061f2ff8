"""The encoders that we serve: what `tests/models/test_pooling_encoders.py` runs over, and what
`docs/models.md` lists. Decoders that pool are those of `families.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderFamily:
    """A family without a head, and with one for classes."""

    name: str
    models: str
    """What people call the models."""
    body: str
    """Architecture of those that embed."""
    classifier: str
    """Of those that score."""
    real_weights: str = ""
    """The model whose real weights are tested."""
    not_supported: str = ""


ENCODER_FAMILIES = [
    EncoderFamily(
        "bert",
        "BERT, all-MiniLM, BGE, E5, GTE (v1), MS MARCO cross-encoders",
        "BertModel",
        "BertForSequenceClassification",
        real_weights="all-MiniLM-L6-v2",
        not_supported="relative positions, ModernBERT, DistilBERT",
    ),
    EncoderFamily(
        "roberta",
        "RoBERTa, all-roberta, RoBERTa cross-encoders",
        "RobertaModel",
        "RobertaForSequenceClassification",
    ),
    EncoderFamily(
        "xlm-roberta",
        "XLM-R, multilingual E5, BGE rerankers",
        "XLMRobertaModel",
        "XLMRobertaForSequenceClassification",
        not_supported="sparse and multi-vector heads",
    ),
]
"""In the order of the page."""
