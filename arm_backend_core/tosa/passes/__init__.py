"""Passes on TOSA graphs; ``pipeline`` has their list, in order."""
