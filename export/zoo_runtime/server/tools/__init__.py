"""Calls of functions in generated texts, in the forms that published models write.

``formats.py`` has a record for each form, ``reading.py`` finds calls in a text that grows, ``grammar.py`` constrains
texts to calls. ``json_text.py`` and ``notation.py`` read the values inside of calls.
"""
