"""One Triton source per operation for both GPU vendors."""
