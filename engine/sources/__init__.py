"""Where a model comes from: a directory, a hub, a GGUF file, the demo catalogue."""
