"""``export``: run the stages for all methods in order, with the export cache and verification."""
