"""Alternatives: bit-equal rewrites of parts of a graph. A cost model chooses the one with the fewest cycles."""
