"""Export cache: a folder of compiled programs, by a digest of model, samples, recipe and toolchain."""
