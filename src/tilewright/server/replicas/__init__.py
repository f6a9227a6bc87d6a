"""Several engines behind one server: routes requests to them, and computes a request again when one is lost."""
