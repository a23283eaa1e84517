"""Readers of tokenized data sets, whoever made them."""
