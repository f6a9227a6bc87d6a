"""Tilewright: multimodal models, served fast on the CPUs people already have."""

__version__ = "0.1.0"
