"""What is computed for the checkpoints of a family: the functions that its records name."""
