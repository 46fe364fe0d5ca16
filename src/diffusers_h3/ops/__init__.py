"""Operators of the hybrid layer, one folder each; `reference.py` is the specification: torch only, differentiable."""
