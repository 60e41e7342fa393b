"""Tokenizers: the inputs of models from texts, texts from ids, and training of new ones."""
