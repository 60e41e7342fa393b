"""Data sets that are computed, or come with installed packages. The modules do not import torch."""
