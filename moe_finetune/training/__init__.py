"""Training on TRL: data, callback, trainer, saving."""
