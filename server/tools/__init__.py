"""Tools: what a request may call, how each family of models writes calls, and the grammars that hold them to it."""
