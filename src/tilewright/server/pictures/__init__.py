"""Pictures and videos over HTTP, as OpenAI's interface has them: /v1/images and /v1/videos."""
