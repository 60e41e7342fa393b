"""Graphs with fixed sizes, in which each row has a past of its own."""
