"""The protocol of OpenAI: ``bodies.py`` and ``shapes.py`` are its requests and answers, ``routes.py`` its routes.

``generate.py`` answers requests for generated text, whole or as streams. ``tools`` has the calls of functions in chats,
and ``responses`` the other shape of chats, ``/v1/responses``.
"""
