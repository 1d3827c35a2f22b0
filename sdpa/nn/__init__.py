"""torch's attention modules with our attention inside: same constructors, signatures, state_dict and initialisation."""

from __future__ import annotations

from sdpa.nn.accelerate import Report, accelerate, restore
from sdpa.nn.attention import MultiheadAttention
from sdpa.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from sdpa.nn.stacks import Transformer, TransformerDecoder, TransformerEncoder

__all__ = [
    "MultiheadAttention",
    "Report",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "accelerate",
    "restore",
]
