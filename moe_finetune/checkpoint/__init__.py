"""Read, merge and write checkpoints without building the model."""
