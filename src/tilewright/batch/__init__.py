"""`tilewright batch`: files of requests in OpenAI's form, answered offline by the server's own code."""
