"""Tasks that read sound."""
