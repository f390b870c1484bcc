"""The papers' headline effects in miniature: small runs, paired by seed, and their results.

``study.run(recipe, output)`` runs what is missing and writes the table of effects.
"""
