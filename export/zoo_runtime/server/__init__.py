"""An HTTP server for exported models: ``zoo serve``.

``process.py`` runs the server of a configuration (``config.py``), ``models.py`` has the open models and
``request_error.py`` the errors of requests.

``engines/`` compute: ``work.py`` is what an engine is given, ``continuous.py`` and ``queued.py`` are the engines,
``exact_batches.py`` the inputs that are answered together, ``prefixes.py`` the cache of prompts' beginnings, and
``sources.py`` that of encoded inputs.

``http/`` talks to clients: ``operations.py`` declares routes and ``bodies.py`` bodies, of which ``openapi.py`` makes a
document. ``responses.py`` has answers, of which ``encoding.py`` encodes the long ones. ``service.py`` is what all
routes share: ``openai/`` has those of OpenAI's API, ``texts/`` those of other servers of texts, ``inference/`` those of
the Open Inference Protocol, and ``operator.py`` the others. ``app.py`` puts them together, ``connections.py`` limits
how long clients may take, and ``origins.py`` which pages in browsers may use the server.
"""
