"""Code for the checkpoints of each family: the functions that its records name."""
