"""LoRA on MoE models: targets, per-expert factors, selection, coverage."""
