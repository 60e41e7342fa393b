"""Engines: the threads that compute answers, input by input, in batches or in continuous batches."""
