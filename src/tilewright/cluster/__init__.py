"""Engines on several machines, or several on one, by Ray. Everything here is imported only when --replicas is given."""
