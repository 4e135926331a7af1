"""Grammars for structured output, compiled and followed by llguidance, which is imported on first use."""
