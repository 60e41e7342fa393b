"""ONNX Runtime: sessions on a chosen provider, memory, the end of runs, and declared graphs."""
