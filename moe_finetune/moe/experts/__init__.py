"""The routed experts' forward and backward, with LoRA."""
