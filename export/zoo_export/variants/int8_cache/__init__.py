"""Graphs that store keys and values in int8."""
