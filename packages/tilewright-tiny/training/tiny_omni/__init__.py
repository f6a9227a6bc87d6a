"""The recipe of the embedded model that hears (README.md)."""
