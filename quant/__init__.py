"""Quantized weights: how they lie on disk, what they mean, and how to make them."""
