"""Pictures as inline SVG: pure functions from numbers to markup."""
