"""The losses in any transformers or TRL trainer, and what ends a training early."""
