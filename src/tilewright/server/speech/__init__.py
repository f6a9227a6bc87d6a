"""A text that is read out: OpenAI's /v1/audio/speech."""
