"""ExecuTorch's developer tools for an export: ETRecord, ETDump and bundled programs."""
