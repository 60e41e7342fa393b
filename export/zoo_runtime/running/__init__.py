"""Sessions: exports opened for running, and the base classes of tasks."""
