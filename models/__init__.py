"""Recipes for real models: where each comes from, how to feed it, what a right answer looks like. No weights live here."""
