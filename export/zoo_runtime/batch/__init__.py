"""Batches: an exported model run on many files of rows, by several workers.

A file of inputs is a shard. Its results are one file of the same name in the output folder, which appears complete, and
one line in the folder's manifest. The plan of a batch, its shards and their outcomes are plain data, so that an engine
can send them to workers on other machines. An engine, declared with the hook ``zoo_engines``, only distributes shards;
reading, computing and committing one is :func:`run_shard`.
"""

from __future__ import annotations

from zoo_runtime.batch.drive import Summary, run_batch
from zoo_runtime.batch.plan import Done, Failure, Plan, Shard
from zoo_runtime.batch.shards import answer_request, run_shard

__all__ = ["Done", "Failure", "Plan", "Shard", "Summary", "answer_request", "run_batch", "run_shard"]
