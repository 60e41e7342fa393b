"""Rows of inputs and results in files: text, JSON, CSV, parquet."""
