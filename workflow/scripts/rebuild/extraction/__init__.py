"""Extraction of a shard's hidden states: what is captured, whether it can be trusted, and how it reaches the disk."""
