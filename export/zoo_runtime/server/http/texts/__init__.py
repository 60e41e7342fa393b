"""Routes on texts beyond OpenAI's API, in the shapes of vLLM's server and of Text Embeddings Inference (TEI).

``tokens.py`` converts between texts and tokens, and ``ranking.py`` scores pairs of texts.
"""
