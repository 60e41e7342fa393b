"""The Open Inference Protocol, version 2, with the extension of binary data: graphs are run on tensors.

``tensors.py`` has the requests and answers, ``graphs.py`` runs a graph, and ``routes.py`` has the routes.
"""
