"""The shipped workloads: one TOML file a question, and `locustfile.py` for plain Locust."""
