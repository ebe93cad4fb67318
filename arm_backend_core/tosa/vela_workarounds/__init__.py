"""Workarounds for bugs of Vela: each module has the predicates and rewrites of one group of bugs."""
