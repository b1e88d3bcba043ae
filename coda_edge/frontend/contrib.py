"""Operators that onnxruntime's own optimiser and tools write, in domain ``com.microsoft``, in the basic operators of ONNX.

| module | operators |
|---|---|
| ``contrib_basic`` | GELUs, norms, FusedMatMul, FusedGemm |
| ``contrib_embedding`` | EmbedLayerNormalization |
| ``contrib_attention`` | Attention, MultiHeadAttention, DecoderMaskedMultiHeadAttention |
| ``contrib_grouped`` | GroupQueryAttention |
| ``contrib_rotary`` | RotaryEmbedding |

Source: onnxruntime's ContribOperators documentation.
"""

from __future__ import annotations

from . import contrib_attention, contrib_basic, contrib_embedding, contrib_grouped, contrib_rotary

# Imported for the rules that they register.
_RULES = (contrib_attention, contrib_basic, contrib_embedding, contrib_grouped, contrib_rotary)
