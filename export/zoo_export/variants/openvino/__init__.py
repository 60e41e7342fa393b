"""Models in another precision on OpenVINO: with quantised weights, or computed in bfloat16."""
