"""The step loop: scheduler, block pool, batch, runner, sampler."""
