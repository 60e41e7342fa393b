"""Data of a training run: rows of files, the examples that are made of them, and the order of the examples."""
