"""Options, precisions and targets of the recipes, and recipes that are saved to files."""
