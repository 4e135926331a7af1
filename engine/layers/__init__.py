"""The layers that models are made of."""
