"""What ExecuTorch's developer tools take of an export: ETRecord, ETDump and bundled programs."""
