"""Recorded comparisons: samples of a model's float64 outputs beside its exports, and their replay on any runtime."""
