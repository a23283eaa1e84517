"""Backends that produce hidden states: the model in transformers, and the serving engine's own capture."""
