"""Which experts a token gets: biases, kept and pinned choices, noise."""
