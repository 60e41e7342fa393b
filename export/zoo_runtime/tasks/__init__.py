"""The built-in tasks: rows of input to feeds, and outputs to results."""
