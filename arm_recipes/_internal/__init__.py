"""Internal helpers that import no other folder of this package: messages, files, versions, ExecuTorch internals."""
