"""Self-tests on a small model of the type: a family, and a recipe on the installed versions."""
