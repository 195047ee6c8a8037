"""The running engine: controller, worker, runner, sampler."""
