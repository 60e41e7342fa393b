"""The commands that run exported models."""
