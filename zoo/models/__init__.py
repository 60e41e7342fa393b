"""Creating, saving, loading and adapting models."""
