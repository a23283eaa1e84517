"""Hidden states: which layers, of which samples, and whether they can be trusted."""
