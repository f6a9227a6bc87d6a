"""The recipe of the embedded model that draws (README.md)."""
