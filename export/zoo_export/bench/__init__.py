"""Benchmarks of exported models, compared with torch and with the limits of the machine.

A graph with a cache is measured on prompts (*prefill*) and on one further token (*decode*), any other graph on whole
inputs (*encode*). The session, torch and two hardware limits are timed in interleaved rounds, so that background load
affects all of them equally.

Curves cover several lengths, each measured in a separate process.
"""

from zoo_export.bench.measure import bench_model

__all__ = ["bench_model"]
