"""The process of one model instance, and the module that Triton's Python models import."""
