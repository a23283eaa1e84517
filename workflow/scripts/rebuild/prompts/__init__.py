"""From the rows of a source to prompts in shards."""
