"""Ways to carry plans to the workers; the engine core sees only `contracts.seams.Executor`."""
