"""Formats: read a checkpoint's quantization config and convert its tensors to the canonical layout."""
