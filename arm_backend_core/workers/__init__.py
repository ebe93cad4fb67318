"""Worker processes for native tools that may crash (Vela, the reference model), and the model converter's driver."""
