"""Rows of independent texts on the graphs of the profile ``serving``."""
