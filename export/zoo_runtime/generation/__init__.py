"""Generation of tokens by any decoder that returns logits, and the options for it."""
