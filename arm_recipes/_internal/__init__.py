"""Helpers of this package that import nothing else of it: messages, files, versions."""
