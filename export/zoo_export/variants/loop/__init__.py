"""One graph with the whole decoding loop."""
