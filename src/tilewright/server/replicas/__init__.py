"""Several engines behind one server: which of them gets a request, and what happens to it when one is lost."""
