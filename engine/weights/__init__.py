"""Reading checkpoints tensor by tensor."""
