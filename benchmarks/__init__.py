"""Timings of real models against onnxruntime and against what the machine can do."""
