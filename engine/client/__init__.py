"""Talking to a core, in this process or in another."""
