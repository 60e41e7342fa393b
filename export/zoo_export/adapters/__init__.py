"""Low-rank adapters as data of one graph: each row of a batch chooses its own."""
