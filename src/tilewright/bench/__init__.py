"""Measurements: every kernel beside torch, and whole models beside what the machine allows."""
