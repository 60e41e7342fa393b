"""Somebody else's ONNX graphs, held against the model that they claim to be.

Their inputs and outputs are mapped to the declared ones by the conventions of the tools that write such graphs. They
are then run at the points of the grid of zoo's own exports, and judged by the model in float64. A question that a graph
does not let be asked, such as that of a padded batch without a mask, is named as a limit.
"""
