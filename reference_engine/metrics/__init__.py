"""What the frontend counts, and how `/metrics` shows it."""
