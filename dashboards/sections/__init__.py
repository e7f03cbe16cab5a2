"""The sections of a page, each as data."""
