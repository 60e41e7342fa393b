"""Comparison of ONNX exports in a browser, on onnxruntime-web."""
