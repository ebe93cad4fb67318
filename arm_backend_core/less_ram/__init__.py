"""Programs that need less RAM: arena limits of Vela."""
