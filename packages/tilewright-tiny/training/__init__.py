"""Recipes of the models that the package carries."""
