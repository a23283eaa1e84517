"""The target model: where it comes from, where it lies, what it is made of."""
