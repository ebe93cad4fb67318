"""Programs that need less RAM: other configurations of Vela, and patch-based inference of the first layers."""
