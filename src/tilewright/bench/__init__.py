"""Measurements: `tilewright bench kernels` holds every kernel against torch and against the machine's limit."""
