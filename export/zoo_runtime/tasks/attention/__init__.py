"""Tasks that return attention weights."""
