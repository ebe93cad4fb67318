"""``tune``: the most exact program within a budget, found by measurement."""
