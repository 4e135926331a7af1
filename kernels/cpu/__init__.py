"""The CPU platform's own kernels."""
