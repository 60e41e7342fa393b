"""HTTP: the routes of all protocols, their bodies and responses."""
