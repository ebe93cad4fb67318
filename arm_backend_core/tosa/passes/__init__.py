"""Passes on TOSA graphs. ``pipeline`` lists them in order."""
