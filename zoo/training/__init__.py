"""Training: objectives, data, and a loop whose every step is a pure function of the seed and the step number.

Importing the modules ``settings``, ``order``, ``rows`` and ``examples`` does not import torch; the others do.
"""
