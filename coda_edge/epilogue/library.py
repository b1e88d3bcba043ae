"""Ready epilogues, written as a user would write one. Shapes: tile [M, N], row [M, 1], col [N].

Those called ``norm_…`` follow a GEMM over the *raw* input of a normalisation whose gain and centring are folded into the
weights: what is left of the norm is one factor a row, 1/√(var + eps) (arXiv 2605.19269).
"""

from __future__ import annotations

from . import math as functions
from .frontend import Col, Row, Stored, Tile, Value, epilogue
from .math import even, exp, gelu, gelu_tanh, moments, odd, relu, row_max, row_sum, rsqrt, silu, store


@epilogue
def bias(acc: Tile, bias: Col) -> Value:
    """acc + bias."""
    return acc + bias


@epilogue
def bias_gelu(acc: Tile, bias: Col) -> Value:
    """GELU (erf) of acc + bias."""
    return gelu(acc + bias)


@epilogue
def bias_gelu_tanh(acc: Tile, bias: Col) -> Value:
    """GELU (tanh approximation) of acc + bias."""
    return gelu_tanh(acc + bias)


@epilogue
def bias_silu(acc: Tile, bias: Col) -> Value:
    """SiLU of acc + bias."""
    return silu(acc + bias)


@epilogue
def bias_relu(acc: Tile, bias: Col) -> Value:
    """max(acc + bias, 0)."""
    return relu(acc + bias)


@epilogue
def bias_residual(acc: Tile, bias: Col, residual: Tile) -> Value:
    """acc + bias + residual."""
    return acc + bias + residual


@epilogue
def bias_residual_moments(acc: Tile, bias: Col, residual: Tile) -> dict[str, Value]:
    """The residual stream ``y``, and ``mean`` and ``var`` of its rows for the norm that follows."""
    y = acc + bias + residual
    mean, var = moments(y)
    return {"y": y, "mean": mean, "var": var}


@epilogue
def bias_heads(acc: Tile, bias: Col, heads: int = 64) -> Stored:
    """acc + bias, stored as attention reads it: [B, S, H·D] as [B, H, S, D], ``heads`` columns D a head."""
    return store(acc + bias, heads=heads)


@epilogue
def norm_bias(acc: Tile, var: Row, bias: Col, eps: float = 1e-5) -> Value:
    """acc/√(var + eps) + bias: a linear layer after a norm."""
    return acc * rsqrt(var + eps) + bias


@epilogue
def norm_bias_gelu(acc: Tile, var: Row, bias: Col, eps: float = 1e-5) -> Value:
    """GELU (erf) of a linear layer after a norm."""
    return gelu(acc * rsqrt(var + eps) + bias)


@epilogue
def swiglu(acc: Tile) -> Value:
    """silu(gate)·up, N/2 columns; gate and up are the even and odd columns of acc (arXiv 2002.05202)."""
    return silu(even(acc)) * odd(acc)


@epilogue
def geglu(acc: Tile) -> Value:
    """gelu(gate)·up, N/2 columns; gate and up are the even and odd columns of acc (arXiv 2002.05202)."""
    return gelu(even(acc)) * odd(acc)


@epilogue
def norm_swiglu(acc: Tile, var: Row, eps: float = 1e-5) -> Value:
    """SwiGLU after a norm; for RMSNorm ``var`` is the mean square of each row."""
    scaled: Value = acc * rsqrt(var + eps)
    return silu(even(scaled)) * odd(scaled)


@epilogue
def rope(acc: Tile, cos: Tile, sin: Tile) -> Value:
    """Rotary embedding of column pairs (2i, 2i+1); ``cos`` and ``sin`` have N/2 columns."""
    return functions.rope(acc, cos, sin)


@epilogue
def softcap(acc: Tile, cap: float) -> Value:
    """cap·tanh(acc/cap): attention scores or logits, softly limited."""
    return functions.softcap(acc, cap)


@epilogue
def scale_mask(acc: Tile, mask: Col, scale: float) -> Value:
    """acc·scale + mask: attention scores with a mask of keys."""
    return acc * scale + mask


@epilogue
def scale_mask_tile(acc: Tile, mask: Tile, scale: float) -> Value:
    """acc·scale + mask: attention scores with a mask of query and key."""
    return acc * scale + mask


@epilogue
def bias_row_max(acc: Tile, bias: Col) -> dict[str, Value]:
    """Logits ``y`` and the ``max`` of each row."""
    return {"y": acc + bias, "max": row_max(acc + bias)}


@epilogue
def bias_row_sumexp(acc: Tile, bias: Col, shift: Row) -> dict[str, Value]:
    """Logits ``y`` and Σ e^(y − shift) of each row: log(sumexp) + shift is its logsumexp, for a shift near the row's max."""
    y = acc + bias
    return {"y": y, "sumexp": row_sum(exp(y - shift))}
