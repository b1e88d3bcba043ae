"""Operators that onnxruntime's own optimiser and tools write, in domain ``com.microsoft``, in the basic operators of ONNX.

| module | operators |
|---|---|
| ``contrib_basic`` | GELUs, norms, fused products and convolutions, what ONNX has taken over since |
| ``contrib_embedding`` | EmbedLayerNormalization |
| ``contrib_attention`` | Attention, MultiHeadAttention, DecoderMaskedMultiHeadAttention |
| ``contrib_grouped`` | GroupQueryAttention |
| ``contrib_bias`` | RelativePositionBias |
| ``contrib_rotary`` | RotaryEmbedding |
| ``contrib_quantized`` | QAttention, QGemm, QLinearAdd and its kin |
| ``contrib_blocks`` | MatMulNBits, GatherBlockQuantized, MatMulBnb4 |

Source: onnxruntime's ContribOperators documentation.
"""

from __future__ import annotations

from . import (
    contrib_attention,
    contrib_basic,
    contrib_bias,
    contrib_blocks,
    contrib_embedding,
    contrib_grouped,
    contrib_quantized,
    contrib_rotary,
)

# Imported for the rules that they register.
_RULES = (
    contrib_attention,
    contrib_basic,
    contrib_bias,
    contrib_blocks,
    contrib_embedding,
    contrib_grouped,
    contrib_quantized,
    contrib_rotary,
)
