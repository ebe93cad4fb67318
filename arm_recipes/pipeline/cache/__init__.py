"""Exports that are answered from a folder: what was made of the same model, samples and recipe before."""
