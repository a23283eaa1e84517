"""Token ids and masks of answers that came as text alone, and how far texts are from the engine's ids."""
