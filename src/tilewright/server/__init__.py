"""HTTP in front of the engine, as OpenAI's clients speak it. Imports no torch."""
