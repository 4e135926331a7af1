"""Methods that make quantized weights."""
