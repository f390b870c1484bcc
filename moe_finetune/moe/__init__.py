"""Hooks that make MoE layers hand over what they compute, and the experts forward."""
