"""``sweep``: one model on many configurations of Ethos-U NPUs, beside each other."""
