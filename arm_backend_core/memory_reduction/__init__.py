"""Programs that need less RAM: arena limits of Vela, patch-based inference of the first layers."""
