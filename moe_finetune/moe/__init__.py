"""Hooks that record what MoE layers compute, and the experts' forward."""
