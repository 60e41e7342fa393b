"""The attention page: its HTML, style and scripts, and the module that assembles them."""
