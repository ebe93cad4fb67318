"""Searches that export a model many times: configuration sweep, precision tuning, advice."""
