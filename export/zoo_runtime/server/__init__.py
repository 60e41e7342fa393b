"""An HTTP server for exported models: ``zoo serve``.

``work.py`` is what an engine is given, ``rows.py`` and ``alone.py`` are the engines, ``models.py`` the open models,
``bodies.py`` and ``shapes.py`` the requests and answers of OpenAI's API, ``responses.py`` how answers are sent, and
``app.py`` the routes.
"""
