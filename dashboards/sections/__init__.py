"""The sections of a page, each as data: a title, an explanation, and its figures and tables or the
reason for their absence.
"""
