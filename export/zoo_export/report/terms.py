"""The words of docs/reference/parity.md for the fields of the evidence. A test compares both."""

from __future__ import annotations

__all__ = ["FIELDS", "LEVELS"]

FIELDS = {
    "reference": "what the graphs are compared with",
    "yardstick": "for a quantised graph: what PyTorch computes to give the limits, by level",
    "rule": "the rule by which outputs are judged",
    "provider": "execution provider of ONNX Runtime",
    "dtype": "dtype of the model",
    "precision": "precision of the variant",
    "properties": "properties of OpenVINO with which a variant in another precision is compared and run",
    "discontinuous": "why the architecture is declared discontinuous, if it is",
    "weights_in_memory": (
        "how ONNX Runtime holds the weights: fast if it repacks them for its kernels, mapped if it reads large ones "
        "from their file"
    ),
    "unused_tensors": "stored weights that no graph reads",
    "not_perturbed": (
        "weights that keep their values in the comparison with other weights, because the architecture declares "
        "them fixed"
    ),
    "options": (
        "options of the exporter: opset, functions, attentions, profile, windows, and contrib for operators of ONNX "
        "Runtime"
    ),
    "sizes": "of the profile serving: rows (batch), tokens of a chunk (sequence) and positions of a row (capacity)",
    "versions": "versions of the packages that took part",
    "max_abs_error": "largest error of the graph",
    "torch_max_abs_error": "largest error of PyTorch in the model's own dtype, the yardstick",
    "limit": "largest error that the rule allows",
    "ratio": "max_abs_error divided by torch_max_abs_error",
    "local_error, local_limit": (
        "the same rule in units of the largest value in the row or channel of each number, whichever is smaller"
    ),
    "worst_point": (
        "the input with the largest error: batch, length (tokens of the call), past (tokens before it), padding, "
        "and sizes of further dimensions"
    ),
    "max_kl_divergence, torch_max_kl_divergence": (
        "largest Kullback-Leibler divergence from the reference, of the graph and of PyTorch, in nats"
    ),
    "min_top_10_overlap, top_10_disagreements": (
        "smallest share of common tokens among the ten likeliest; tokens that the graph ranks lower although they "
        "are no near-tie"
    ),
    "argmax_disagreements, argmax_near_ties": (
        "rows whose likeliest token differs: without, and with two logits nearer than their errors"
    ),
    "grid.seed": "random seed of the inputs",
    "grid.points, grid.left_out": "the inputs; how many of the full grid were left out for their cost",
    "grid.reduced": "inputs at which not all levels were run, or a large output was compared at some positions only",
    "grid.coverage.GRAPH": (
        "conditions of the graph: their number (conditions), the outcomes that occurred, those that are impossible, "
        "and unseen ones by name"
    ),
    "sample": "the text, its digest sha256, and the number of windows into which it was cut",
    "bytes, float32_bytes": "size of the weights, and of those in float32",
    "kept_float32": "weights that were kept in float32, with the reason",
    "comparisons.WEIGHTS.reach": "how far a logit may move, by the rule",
}
"""The meaning of fields."""

LEVELS = {
    "off": "graph optimisations of ONNX Runtime off",
    "all": "graph optimisations on, as sessions have them",
    "perturbed": (
        "the same with noise on every weight, which shows weights that the graph has as constants or does not read"
    ),
    "faint": "the same with weights scaled by 1/8, which makes small constants matter, such as the epsilon of a norm",
    "exact": (
        "of a quantised graph, products in float32 instead of integers; of one in bfloat16 on OpenVINO, all in float32"
    ),
    "perturbed_exact": "the same with noise on the weights that are not quantised",
}
"""The meaning of levels, ways to run a graph."""
