"""``compare``: a program and its float model, by output and by layer."""
