"""The HTTP server: OpenAI's interface in front of an engine that runs in a process of its own. Imports no torch."""
