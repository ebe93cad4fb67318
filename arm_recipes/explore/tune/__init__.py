"""``tune``: measured mixed-precision search for the most accurate program within a budget."""
