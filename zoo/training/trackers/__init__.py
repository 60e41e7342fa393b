"""Trackers: TensorBoard, Trackio, and Weights & Biases."""
