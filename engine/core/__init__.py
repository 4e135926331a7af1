"""The engine core: schedules samples over a pool of KV blocks, runs the model and draws tokens, one step at a time."""
