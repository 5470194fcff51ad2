"""One socket between a caller and a host, and what travels on it."""
