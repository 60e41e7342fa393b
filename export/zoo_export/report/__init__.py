"""The page of ``zoo report``: the evidence of a model directory, for readers who did not export it."""
