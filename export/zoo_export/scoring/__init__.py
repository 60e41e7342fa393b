"""Scores of the answers of ``zoo run`` on labelled data."""
