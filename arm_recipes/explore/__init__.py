"""Searches that export a model many times: configurations, precisions, advice."""
