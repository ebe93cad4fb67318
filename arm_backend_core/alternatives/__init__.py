"""Alternatives: bit-exact rewrites of subgraphs, among which a cost model chooses the cheapest."""
