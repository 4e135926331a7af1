"""Model mathematics, driven by the config."""
