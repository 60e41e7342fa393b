"""Long texts: counted without encoding all of them, truncated, or divided into windows."""
