"""``/v1/responses``: ``bodies.py`` has its requests, which become chats, and ``answers.py`` its answers."""
