"""How fast an exported model is on this machine, beside torch and beside what the machine can do at most.

Every graph is measured as its declaration says: one with a past reads prompts (*prefill*) and continues them by one
token (*decode*); any other *encodes*. The session, torch and two limits take turns, so that what else the machine does
falls on all of them alike.

A curve is of several lengths, and each of its points is measured in a process of its own.
"""

from zoo_export.bench.measure import bench_model

__all__ = ["bench_model"]
