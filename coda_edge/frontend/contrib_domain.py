"""The name of onnxruntime's own operator domain, and which of its operators are refused."""

from __future__ import annotations

MICROSOFT = "com.microsoft"
