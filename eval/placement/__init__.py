"""Place experts on ranks so that a token's experts share few of them (P1, appendix D)."""

from eval.placement.search import plan_placement

__all__ = ["plan_placement"]
