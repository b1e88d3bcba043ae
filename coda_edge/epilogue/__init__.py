"""Epilogues: what a GEMM does to its output tile before it stores it.

Layers, each knowing only those before it: ``ops`` (the operator table), ``program`` (the typed program), ``text`` and
``reference`` (its text and its meaning), ``builder`` (growing one), ``onnx`` and ``tir`` (spelling one), ``frontend`` with
``math`` (writing one as a Python function) and ``library`` (ready ones).
"""
