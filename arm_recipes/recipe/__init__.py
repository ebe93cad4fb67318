"""Recipes: options, precisions, boards, compile specs, and the JSON form in which recipes are saved."""
