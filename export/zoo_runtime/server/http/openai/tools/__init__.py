"""Tools in chats: the messages about calls, the options of a text that may call functions, and the answer.

``calling.py`` decides how an answer may call functions, ``messages.py`` has the messages as templates read them, and
``answers.py`` the shapes of answers. The fields of requests are in ``tool_bodies.py``.
"""
