"""``export``: the stages in order, several methods, the cache, verification."""
