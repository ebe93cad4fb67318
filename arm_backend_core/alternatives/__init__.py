"""Equal forms of parts of a graph, of which the compiler takes the one that its target does in the fewest cycles."""
