"""The engine: from a request to its tokens."""
