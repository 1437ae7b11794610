"""Hold the functions that records of checkpoints name as "@module.function", one module per family."""
