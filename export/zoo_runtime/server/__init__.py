"""An HTTP server for exported models: ``zoo serve``.

``work.py`` is what an engine is given, ``rows.py`` and ``queued.py`` are the engines, ``models.py`` the open models,
``batches.py`` the inputs that are answered together, ``prefixes.py`` the cache of prompts' beginnings, and
``config.py`` the configuration file.
``operations.py`` declares routes and ``bodies.py`` bodies, of which ``openapi.py`` makes a document. ``responses.py``
has answers, of which ``encoding.py`` encodes the long ones. ``service.py`` is what all routes share: ``openai/`` has
those of OpenAI's API, ``inference/`` those of the Open Inference Protocol, and ``operator.py`` the others. ``app.py``
puts them together, ``run.py`` runs them, ``connections.py`` limits how long clients may take, and ``origins.py`` which
pages in browsers may use the server.
"""
