"""Export cache: a folder of compiled programs, whose keys are digests of model, samples, recipe and toolchain."""
