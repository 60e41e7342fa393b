"""Weights quantised in blocks, and graphs whose operators read them."""
