"""Lowering: convert an fx graph to a TOSA graph; ``walk`` has the class, the other modules what it reads and checks."""
