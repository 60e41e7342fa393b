"""The built-in objectives. Importing the modules imports torch."""
