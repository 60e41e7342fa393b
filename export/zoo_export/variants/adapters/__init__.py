"""Graphs with low-rank adapters, of which each row of a batch chooses one."""
