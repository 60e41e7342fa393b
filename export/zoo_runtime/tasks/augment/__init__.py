"""Tasks that make variants of a text, for training."""
