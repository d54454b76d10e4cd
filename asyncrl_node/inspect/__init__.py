"""Reads a run directory: verify, report."""
