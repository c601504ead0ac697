"""Generators of the documentation; `python -m tools --write` writes what they make."""
