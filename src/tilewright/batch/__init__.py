"""`tilewright batch`: answers files of requests in OpenAI's batch format, with the server's own code."""
