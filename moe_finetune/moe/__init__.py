"""MoE layers of a model: what they compute, recorded and changed.

The files here are what all rooms share: the layers, what a forward's arguments say of its rows, the
context of one forward. ``recorder`` has the hooks, ``experts`` the experts' forward and backward,
``choice`` what decides which experts a token gets, ``large`` what one large model needs.
"""
