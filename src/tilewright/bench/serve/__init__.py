"""`tilewright bench serve`: measures any OpenAI-compatible server from outside."""
