"""Recipes: their options, precisions, targets, and saved form."""
