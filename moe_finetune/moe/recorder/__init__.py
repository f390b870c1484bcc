"""Hooks that record what MoE layers compute, and remove themselves."""
