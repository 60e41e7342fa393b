"""Low-rank adapters: training them beside the weights of a model, and merging them into those weights."""
