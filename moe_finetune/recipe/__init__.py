"""Recipes: YAML files as one tree, its sections and methods, validated."""
